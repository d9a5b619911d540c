"""Many Runs: which ones (`wanted`), how far each is (`entries`), here (`local`) or on `slurm`."""
