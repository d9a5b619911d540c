"""Everything MPI: collectives, the one-sided window, which client where."""
