"""What `dpfl_mpi.config` is made of: `fields` that know their range, `texts` and `files` as settings, the `steps` of `Run.resolve`."""
