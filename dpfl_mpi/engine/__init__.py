"""The loop of every method: train, record, tune, finish."""
