"""What `dpfl_mpi.sweep` is made of: submissions (`jobs`), what became of them (`known`), and the table of it (`table`)."""
