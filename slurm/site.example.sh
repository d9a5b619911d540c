# Copy this to slurm/site.sh. The sbatch file and sweeps source it in every job; `. slurm/site.sh` before sbatch gives you the same at the login node.
module load mpich                        # the MPI that mpi4py was built with
. .venv/bin/activate                     # the environment with dpfl_mpi in it
export SBATCH_ACCOUNT=my_project         # read by sbatch: as --account and --partition on every command line
export SBATCH_PARTITION=standard
export SALLOC_ACCOUNT=$SBATCH_ACCOUNT SALLOC_PARTITION=$SBATCH_PARTITION  # salloc reads its own
# export MPI4PY_LIBMPI=/path/to/libmpi.so  # where mpi4py loads another MPI than mpirun's or srun's
# export SLURM_MPI_TYPE=pmi2             # what srun takes without --mpi
