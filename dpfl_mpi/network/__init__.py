"""A network that costs something, as docs/network.md says: `profiles` draws its speeds and links, `clock` is when each client has done what.

The engine computes rounds one after the other; the clocks say when each client would have done its part, so methods run as they are.
"""
