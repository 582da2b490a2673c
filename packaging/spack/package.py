# Copy this folder to a Spack repository as packages/py_gemsc, then:
#   spack install py-gemsc +onnx +keras ^openmpi fabrics=ucx schedulers=slurm
from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyGemsc(PythonPackage):
    """A compiler that splits PyTorch models over MPI ranks and trains them exactly."""

    pypi = "gemsc/gemsc-0.1.0.tar.gz"
    license("MIT")

    # the digest of the source archive: `spack checksum py-gemsc` once it is published
    version("0.1.0")

    variant("onnx", default=False, description="Import and export ONNX files")
    variant("keras", default=False, description="Import Keras files")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("py-torch@2.11:")
        depends_on("py-numpy")
        depends_on("py-safetensors")
        depends_on("py-graphviz@0.20:")
        depends_on("py-typer@0.15:")
        depends_on("py-jinja2@3:")
        depends_on("py-rich@13:")
        depends_on("py-tomli-w@1.0:")
        depends_on("py-mpi4py@4:")
        depends_on("py-onnx@1.16:", when="+onnx")
        depends_on("py-onnxscript", when="+onnx")
        depends_on("py-h5py@3.8:", when="+keras")
    depends_on("mpi", type="run")
    depends_on("graphviz", type="run")
