"""Studies of results: how far the greedy search is from the best graph, and how many partitions a difference takes."""
