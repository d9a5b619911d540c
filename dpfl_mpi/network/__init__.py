"""A network that costs something, as docs/network.md says: `profiles` draws its speeds and links, `clock` is when each client has done what.

The engine computes rounds one after the other. The clocks say when each client would have done its part, so methods run as they are. Every rank
has the clocks of all N clients, and moves them by counts that it gathers: steps, images scored, edges of the graph.

    staleness  the mail room keeps the last S + 1 rows of each client; the clock says which one has arrived along an edge
    codecs     the mail room encodes a row once after it was trained; the clock is told the bytes of every message
    churn      who is present is asked of one table of joins and leaves by time; a round, a share and a late comer are cases of it
"""
