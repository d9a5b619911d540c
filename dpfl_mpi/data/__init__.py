"""What clients hold: data sets as sources, and partitions of them."""
