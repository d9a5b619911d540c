"""What `dpfl_mpi.sweep` is made of: its flags (`flags`), which Runs (`wanted`), Slurm (`jobs`) and this machine (`here`), what became of them
(`known`), and the table of it (`table`)."""
