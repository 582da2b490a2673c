"""The script that trains a program under Slurm: `sbatch build/x/job.sbatch`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from string import Template

from gemsc.base.process import MALLOC_SETTING
from gemsc.base.units import show_bytes
from gemsc.plan import Plan

SCRIPT = Template("""\
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


def job_script(plan: Plan, directory: Path) -> str:
    """Return the script for a program's place and this Python."""
    return SCRIPT.substitute(
        name=re.sub(r"[^\w.-]", "_", directory.resolve().name),
        ranks=plan.ranks,
        peak=show_bytes(max(plan.peak_bytes)),
        python=shlex.quote(str(Path(sys.executable).with_name("python3"))),
        program=shlex.quote(str(directory.resolve())),
        malloc=MALLOC_SETTING,
    )
