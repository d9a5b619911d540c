# Copy this file to slurm/site.sh: every job sources it. On a login node, type `. slurm/site.sh`.
module load mpich                     # the MPI that mpi4py was built with
. .venv/bin/activate                  # the environment in which dpfl_mpi is installed
export SBATCH_ACCOUNT=my_project      # for sbatch, like --account and --partition
export SBATCH_PARTITION=standard
export SALLOC_ACCOUNT=$SBATCH_ACCOUNT SALLOC_PARTITION=$SBATCH_PARTITION  # the same for salloc
# export MPI4PY_LIBMPI=/path/to/libmpi.so  # if mpi4py loads another MPI than that of mpirun or srun
# export SLURM_MPI_TYPE=pmi2               # what srun takes without --mpi
