"""What `dpfl_mpi.config` is made of: fields that know their range (`fields`), and settings written as a short text (`texts`)."""
