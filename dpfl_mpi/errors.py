"""The exceptions that the command line knows: a sentence for the user, and the end of a rank whose root failed."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's, or a situation only the user can mend: one clear sentence, never a traceback."""


class RootFailed(Exception):
    """Root ended with an error of its own, which it reports; a rank that waited for root's answer cannot go on."""
