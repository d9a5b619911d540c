"""What lets a run go on after a kill: checkpoints, signals, locks, shared memory."""
