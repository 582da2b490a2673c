"""What a proof for all inputs costs, beside a step in float32.

python benchmarks/all_inputs.py [--repeats 3] [--only unet]

CPU seconds of one step of the ranks' files in float32, as threads of this process, and
of `gemsc verify --all-inputs`: three draws, each a step and an evaluation of the ranks
and of the model, in this process, too. The least of some rounds counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gemsc.plan import Plan
from gemsc.runtime.data.batches import repeated
from gemsc.runtime.training.verification import record_steps
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.field.check import check_program_for_all_inputs
from gemsc.verify.first_step import on_threads
from gemsc.verify.steps import user_model_of

EXAMPLES = Path(__file__).parents[1] / "examples"
GPT = f"""
import sys

sys.path.append("{Path(__file__).parents[1] / "tests" / "support"}")
from gpt import Gpt, cross_entropy as loss, words

def model():
    return Gpt(192, 6, 4, 1000, 64, dropout=0.1)

def example_inputs():
    return words(2, 64, 1000)[0]

def example_target():
    return words(2, 64, 1000)[1]
"""
RUN = "import gemsc.cli; gemsc.cli.main()"
SUBJECTS = {
    "mlp": ("mlp.py", "--ranks 2 --micro-batches 4"),
    "unet": ("unet_histology/model.py", "--ranks 4 --tiles 2x2 --micro-batches 2"),
    "gpt": (GPT, "--ranks 2 --shards 2 --micro-batches 2"),
    "inception": ("inception.py", "--ranks 2 --branches 2 --micro-batches 2"),
    "resnet18": ("resnet18.py", "--ranks 8 --data 2 --micro-batches 2"),
}


def measure(name: str, repeats: int) -> str:
    """Return a row of the table."""
    source, options = SUBJECTS[name]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "small_gpt.py"
        file.write_text(GPT)
        if source is not GPT:
            file = EXAMPLES / source
        program = Path(folder) / "program"
        command = [sys.executable, "-c", RUN, "compile", str(file)]
        subprocess.run(
            [*command, *options.split(), "-o", str(program)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        plan = Plan.read(program / "plan.toml")
        user = user_model_of(program, plan)
        inputs = user.make_inputs()
        batch = repeated((inputs, user.make_target(inputs)), plan)

        def step(transport: Transport) -> list[float]:
            given = program, transport, program, [batch], torch.float32, None
            return record_steps(*given, measure=False)

        steps, proofs = [], []
        for _ in range(repeats):
            start = time.process_time()
            on_threads(plan.ranks, step, torch.float32)
            steps.append(time.process_time() - start)
            start = time.process_time()
            proof = check_program_for_all_inputs(program)
            proofs.append(time.process_time() - start)
    what = f"{proof.verdict}, {proof.num_gradients} gradients"
    return f"{name:10} {options:46} {min(steps):6.2f}s {min(proofs):6.1f}s  {what}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=SUBJECTS, default=None)
    given = parser.parse_args()
    print(f"{'model':10} {'options':46} {'step':>7} {'proof':>7}")
    for name in SUBJECTS:
        if given.only in (None, name):
            print(measure(name, given.repeats), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
