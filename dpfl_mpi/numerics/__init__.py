"""Models as rows of a tensor: their training and scores, and the samples of a rank's clients."""
