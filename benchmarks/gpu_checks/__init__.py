"""The checks of gpu.py, each a function that gives lines of a report."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # its local_transport
