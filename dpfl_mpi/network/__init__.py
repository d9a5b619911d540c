"""A network that costs something (--network): speeds and links of the clients, and a clock for each. Simulated time decides, real time never.

    profiles   seconds per step and image, rates and latency of every client: drawn from a named profile, or of a file
    clock      when each client has trained, scored, sent and received; for whom it waited

The engine computes rounds one after the other. The clocks say when each client would have done its part, so methods run as they are. Every rank
has the clocks of all N clients, and moves them by counts that it gathers: steps, images scored, edges of the graph. Times are whole nanoseconds: equal
times are equal, sums are exact, and ties go by client number.

    staleness  the mail room keeps the last S + 1 rows of each client; the clock says which one has arrived along an edge
    codecs     the mail room encodes a row once after it was trained; the clock is told the bytes of every message
    churn      who is present is asked of one table of joins and leaves by time; a round, a share and a late comer are cases of it
"""
