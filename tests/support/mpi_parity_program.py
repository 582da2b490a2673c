"""What a rank of test_mpi.py runs: recorded steps of several programs, in turn.

Arguments are pairs of a folder, which has `program` and `batches.pt`, and a dtype.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gemsc.runtime.process.failure import stop_all
from gemsc.runtime.training.verification import run_recorded_steps
from gemsc.runtime.transport.choose import start_transport

for name, dtype in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    transport = start_transport()
    folder = Path(name)
    try:
        run_recorded_steps(folder / "program", transport, folder, getattr(torch, dtype))
        transport.close()
    except BaseException as error:
        stop_all(error, transport)
