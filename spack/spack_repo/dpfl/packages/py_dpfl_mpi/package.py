from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyDpflMpi(PythonPackage):
    """Decentralized personalised federated learning over MPI: clients pick collaborators."""

    import_modules = ("dpfl_mpi.engine",)

    license("Apache-2.0")
    version("develop")  # the clone that `spack dev-build` is called in

    depends_on("c", type="build")
    depends_on("py-setuptools@70.1:", type="build")
    # py-submitit, which sweeps on Slurm need, is older in Spack than the 1.5.4 that works
    for requirement in (
        "python@3.11:",
        "py-mpi4py@4.1:",  # builds against the MPI of `spack external find`
        "py-torch@2.6:",
        "py-numpy@1.26:",
        "py-h5py@3.10:",
        "py-scikit-learn@1.3:",
        "py-pyyaml@6:",
        "py-tqdm@4.60:",
        "py-pooch@1.7:",
        "py-pillow@10:",
    ):
        depends_on(requirement, type=("build", "run"))
