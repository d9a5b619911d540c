"""Tells others of each round of a run: a log, a callback."""
