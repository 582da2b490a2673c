"""Networks whose values skip stages: torch.distributed.pipelining beside gemsc.

python benchmarks/skip_connections.py [--quick]

The U-Net of examples/unet_histology sends the value of each level to the level across;
every layer of a Llama reads the angles of its rotary embedding, which are computed once
(pytorch#184361). Both are cut into two stages and into four, 1F1B. What torch says is
the error of the first process that has one. What gemsc trained is compared with one
process, in float64, as benchmarks/models.py does. Llama needs `pip install
transformers`, and is left out where that is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import warnings
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hugging_face import first
from models import MICRO_BATCHES, SAMPLES, compiled, error_of, subject
from third_party import Network, image, tokens
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

UNET = Path(__file__).parents[1] / "examples" / "unet_histology" / "model.py"
WAIT = 120.0  # seconds for a step of torch's
CUTS = {
    "U-Net": ("down.1", "down.3", "up.2"),
    "Llama": ("net.model.layers.1", "net.model.layers.2", "net.model.layers.3"),
}  # where the second, third and fourth of four stages begin


class Logits(nn.Module):
    """A model of transformers that returns a tensor, as torch's pipeline needs it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, words: torch.Tensor) -> Any:
        """Return the logits."""
        return first(self.net(words, return_dict=False))


def unet() -> nn.Module:
    """Return the U-Net of the example."""
    spec = importlib.util.spec_from_file_location("unet_histology", UNET)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net: nn.Module = module.model()
    return net


def llama() -> nn.Module:
    """Return a Llama of four layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 4}
    return Logits(LlamaForCausalLM(LlamaConfig(**sizes, **layers, use_cache=False)))


NETWORKS = {
    "U-Net": Network(unet, image(3, 64, 64)),
    "Llama": Network(llama, tokens(12), ""),
}


def torch_rank(name: str, rank: int, ranks: int, place: str, said: Queue[str]) -> None:
    """Train one step of one stage with torch's pipeline; say how it ended."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=ranks
    )
    given = subject(NETWORKS[name])
    cuts = CUTS[name] if ranks > 2 else CUTS[name][1:2]
    try:
        (example, _), (batch, targets) = given.example, given.batch
        split = dict.fromkeys(cuts, SplitPoint.BEGINNING)
        stage = pipeline(given.model, example, split_spec=split).build_stage(
            rank, torch.device("cpu")
        )
        step = Schedule1F1B(stage, ranks, nn.functional.mse_loss).step
        times = ranks // MICRO_BATCHES  # torch wants as many micro-batches as stages
        inputs = [torch.cat([tensor] * times) for tensor in batch] if rank == 0 else []
        target = torch.cat(targets * times) if rank == ranks - 1 else None
        step(*inputs, target=target)
        said.put("")
    except Exception as error:
        said.put(f"{error}")


def torch_says(name: str, ranks: int) -> str:
    """Return the error of torch's pipeline, or that it trains."""
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "store")
        processes = [
            context.Process(target=torch_rank, args=(name, rank, ranks, place, said))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            answers = [said.get(timeout=WAIT)]
            while not answers[-1] and len(answers) < ranks:
                answers.append(said.get(timeout=WAIT))
        except Empty:
            answers = [f"no word in {WAIT:.0f} s"]
        for process in processes:
            process.kill()
            process.join()
    return answers[-1] or "trains"


def gemsc_says(name: str, ranks: int) -> str:
    """Return how far a step of gemsc's ranks is from one process."""
    given = subject(NETWORKS[name])
    return error_of(compiled(given, ranks=ranks), given, ranks, torch.float64)


def main() -> None:
    """Print a row for each network and number of stages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the U-Net alone")
    warnings.simplefilter("ignore")
    quick = parser.parse_args().quick
    print(f"torch {torch.__version__}, micro-batches of {SAMPLES} samples")
    print(f"{'':<7}{'stages':<8}{'gemsc':<11}torch.distributed.pipelining")
    for name in NETWORKS:
        known = importlib.util.find_spec("transformers") is not None
        for ranks in (2, 4) if name == "U-Net" or (known and not quick) else ():
            ours = gemsc_says(name, ranks)
            print(f"{name:<7}{ranks:<8}{ours:<11}{torch_says(name, ranks)}", flush=True)


if __name__ == "__main__":
    main()
