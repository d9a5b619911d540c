"""What `dpfl_mpi.sweep` is made of: its flags (`flags`), which Runs (`wanted`), Slurm (`jobs`) and this machine (`here`), what became of them
(`known`), the table of it (`table`), and how it is ended early (`interrupt`)."""
