"""The program directory: every rank's module, the main program, plan and weights.

A program with a dataset also has `job.sbatch`, which trains it under Slurm.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from torch import Tensor

from gemsc.base.files import ELSEWHERE
from gemsc.base.process import MALLOC_SETTING
from gemsc.base.units import show_bytes
from gemsc.codegen.order import orders
from gemsc.codegen.rank import write_rank
from gemsc.codegen.rank_text import rank_text
from gemsc.codegen.writer import in_docstring
from gemsc.compilation import Compilation
from gemsc.errors import GemscError
from gemsc.plan import Plan, rank_file
from gemsc.weights.write import write_tensors

BESIDE = ".gemsc-"  # the folder in which a program is written
MAIN = '''"""Start one rank: mpirun -n {ranks} python {name}, or gemsc run {name}."""

import sys
from pathlib import Path

from gemsc.runtime import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent))
'''

JOB = Template("""\
#!/bin/bash
# Train on a cluster with Slurm:  sbatch job.sbatch --epochs 10
# What follows the file's name are options of `gemsc run`. What your cluster asks for
# (a partition, an account, memory) goes here, or on the command line of sbatch.

#SBATCH --job-name=$name
#SBATCH --ntasks=$ranks
#SBATCH --cpus-per-task=1
# predicted peak of a rank: $peak
##SBATCH --mem-per-cpu=4G
##SBATCH --gpus-per-task=1
# ranks that share GPUs all see those of their node; add the option --per-device 2
##SBATCH --gpus-per-node=4
##SBATCH --time=24:00:00
# two minutes before the time limit the ranks save a checkpoint and leave
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

python=$python
program=$program
run=$$program/runs/job-$$SLURM_JOB_ID  # the same after a requeue

export OMP_NUM_THREADS=$$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$$SLURM_CPUS_PER_TASK
export GLIBC_TUNABLES=$malloc

# --resume: from the last checkpoint there, if there is one
srun --mpi=pmix "$$python" "$$program" --save "$$run" "$$@" --resume
code=$$?

# 75: they left with a checkpoint, to be started again; not if the job was cancelled
if [ $$code -eq 75 ] && [ "$$(squeue -h -j $$SLURM_JOB_ID -o %T)" = RUNNING ]; then
  scontrol requeue $$SLURM_JOB_ID
fi
exit $$code
""")


def rank_modules(compilation: Compilation) -> dict[str, str]:
    """Return file name -> text for every rank of one copy of the model."""
    placement = compilation.program.require_placement()
    ordered = orders(compilation)
    return {
        rank_file(rank): write_rank(rank_text(compilation, rank, ordered))
        for rank in range(placement.num_ranks)
    }


def write_directory(compilation: Compilation, directory: Path) -> None:
    """Write the program; what else is in the directory stays.

    All of it is written into a folder inside, then moved to its place: a program that
    was there stays whole until the new one is. While files move there is no plan, and
    a directory without one is refused.

    Raises:
        GemscError: the directory holds something that is no program of ours.
        OSError: it cannot be written.
    """
    check_target(directory)
    texts = compilation.all_files()
    texts["__main__.py"] = MAIN.format(
        ranks=compilation.plan.ranks, name=in_docstring(directory.resolve().name)
    )
    if compilation.plan.spec:  # it has a dataset
        texts["job.sbatch"] = _job_script(compilation.plan, directory)
    texts["plan.toml"] = compilation.plan.to_toml(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=BESIDE, dir=directory) as name:
        new = Path(name)
        _write_weights(compilation, new / "weights", directory)
        for file, text in texts.items():
            (new / file).write_text(text, encoding="utf-8")
        (directory / "plan.toml").unlink(missing_ok=True)
        (directory / "weights").mkdir(exist_ok=True)
        _remove(directory, "rank*.py")
        _remove(directory / "weights", "stage*.safetensors")
        _remove(directory / "weights", ELSEWHERE)
        for imported in directory.glob("weights-*"):
            shutil.rmtree(imported)
        for path in (new / "weights").iterdir():
            path.replace(directory / "weights" / path.name)
        for file in texts:  # the plan comes last
            (new / file).replace(directory / file)


def check_target(directory: Path) -> None:
    """Make sure that writing a program into a directory overwrites nothing else.

    Raises:
        GemscError: it is a file, or holds something that is no program of ours.
    """
    if directory.exists() and not directory.is_dir():
        raise GemscError(f"{directory} is a file", help="choose another folder with -o")
    if not directory.exists() or _is_program(directory):
        return
    others = sorted(path.name for path in directory.iterdir())
    others = [name for name in others if not name.startswith(BESIDE)]
    if others:
        names = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
        raise GemscError(
            f"{directory} contains other files ({names})",
            help="choose an empty or new folder with -o",
        )


def _is_program(directory: Path) -> bool:
    try:
        text = (directory / "__main__.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return "from gemsc.runtime" in text and "import main" in text


def _write_weights(compilation: Compilation, folder: Path, directory: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for variant in (*compilation.variants.values(), compilation):
        for program in (variant.evaluation, variant.program):
            module = program.module
            tensors |= dict([*module.named_parameters(), *module.named_buffers()])
    elsewhere = compilation.elsewhere
    for index, names in enumerate(compilation.owned):
        path = folder / f"stage{index}.safetensors"
        kept = names if elsewhere is None else elsewhere.kept(names)
        write_tensors(path, {name: tensors[name] for name in kept})
    if elsewhere is not None and elsewhere.absent:
        elsewhere.write(folder, compilation.owned, directory)


def _remove(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        path.unlink()


def _job_script(plan: Plan, directory: Path) -> str:
    """Return the script for a program's place and this Python."""
    return JOB.substitute(
        name=re.sub(r"[^\w.-]", "_", directory.resolve().name),
        ranks=plan.ranks,
        peak=show_bytes(max(plan.peak_bytes)),
        python=shlex.quote(str(Path(sys.executable).with_name("python3"))),
        program=shlex.quote(str(directory.resolve())),
        malloc=MALLOC_SETTING,
    )
