-- Copy the folder gemsc to one of MODULEPATH; `root` is the environment that gemsc was installed
-- into: python3 -m venv /apps/gemsc/0.1.0; /apps/gemsc/0.1.0/bin/pip install gemsc mpi4py
-- (mpi4py built against the site's MPI: pip install --no-binary mpi4py mpi4py)
help([[gemsc splits PyTorch models over MPI ranks and trains them exactly.
gemsc --help; `gemsc doctor` says what of this machine it can use.]])
whatis("Name: gemsc")
whatis("Version: 0.1.0")
whatis("Description: a compiler for training neural networks that do not fit one device")

local root = "/apps/gemsc/0.1.0"

depends_on("openmpi")
conflict("gemsc")
prepend_path("PATH", pathJoin(root, "bin"))
setenv("GEMSC_ROOT", root)
