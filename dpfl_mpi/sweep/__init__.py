"""Many Runs: which are wanted (`wanted`), Slurm (`jobs`) and this machine (`here`), what became of them (`known`), and the table of it (`table`)."""
