"""The one exception that is shown as a sentence."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's, or a situation only the user can mend: one clear sentence, never a traceback."""
