"""One of several ranks on a GPU: what gpu_checks/ranks.py starts under mpirun."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_checks.lines import Place
from gpu_checks.subjects import SUBJECTS, sgd, unet
from peak_tensors import PeakTensors

import gemsc
from gemsc.runtime.process.device import choose_device, claim_device
from gemsc.runtime.transport.choose import start_transport
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.streams import streams_for

REPEATS = 5


def median_seconds(work: Callable[[], object], turns: int, steps: int) -> float:
    """Return the median over some turns of the seconds of a step."""
    times = []
    for _ in range(turns):
        started = time.perf_counter()
        for _ in range(steps):
            work()
        times.append((time.perf_counter() - started) / steps)
    return statistics.median(times)


def train(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Make steps of a program, perhaps with a part of the device's memory."""
    folder = Path(given["directory"])
    place = Place(device, given.get("is_tiny", True), folder, folder)
    if "picture" in given:
        inputs, target = unet(given["picture"], 1).data(place)
    else:
        torch.manual_seed(1)
        sample = SUBJECTS[given["subject"]].sample
        inputs, target = sample(given["samples"], place.is_tiny)
    cap = given.get("cap")
    limited: Any = contextlib.nullcontext()
    if cap is not None and place.has_gpu:
        claim_device(device)
        total = torch.cuda.get_device_properties(torch.cuda.current_device())
        torch.cuda.set_per_process_memory_fraction(cap / total.total_memory)
    elif cap is not None:
        limited = PeakTensors(cap)
    trainer = gemsc.load(
        folder, optimizer=sgd, device=device, per_device=given.get("per_device")
    )
    with limited:

        def step() -> None:
            trainer.step(inputs, target)
            place.synchronize()

        losses = [trainer.step(inputs, target) for _ in range(2)]
        trainer.transport.barrier()
        seconds = median_seconds(step, given["turns"], given["steps"])
    rank = trainer.transport.rank
    trainer.transport.close()
    return {
        "rank": rank,
        "seconds": seconds,
        "samples": len(inputs[0]),
        "losses": losses,
        "sums_on_device": trainer.transport.sums_on_device,
        "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    }


def linked(device: torch.device, per_device: int | None = None) -> DeviceTransport:
    """Return this rank's end of messages and sums between devices."""
    claim_device(device, per_device=per_device)
    transport = start_transport()
    streams = streams_for(choose_device(transport, device))
    transport.try_device(streams)
    return DeviceTransport(transport, streams)


def send_messages(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Send a buffer of the device to the other rank and back."""
    link = linked(device)
    transport: Any = link.host
    chosen = link.streams.device
    shape, other = (given["bytes"] // 4,), 1 - transport.rank
    mine = torch.arange(shape[0], dtype=torch.float32, device=chosen) + transport.rank
    equal = []

    def there_and_back() -> None:
        incoming = link.receive(shape, torch.float32, other, 1)
        request = link.send(mine, other, 1)
        received = incoming.take()
        link.wait(request)
        equal.append(bool((received - mine == other - transport.rank).all()))

    there_and_back()
    seconds = median_seconds(there_and_back, REPEATS, 1)
    direct = chosen.type == "cuda" and transport.cuda_aware
    rank = transport.rank
    transport.close()
    return {
        "rank": rank,
        "seconds": seconds,
        "equal": all(equal),
        "direct": direct,
    }


def sum_up(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Let all ranks sum a buffer, exchange shares of one, and gather them."""
    link = linked(device, given["per_device"])
    transport, chosen = link.host, link.streams.device
    rank, size = transport.rank, transport.size
    group = link.group(tuple(range(size)))
    length = given["bytes"] // 4 // size * size
    sizes, total = [length // size] * size, size * (size - 1) // 2
    numbers = torch.arange(length, device=chosen) % 1000
    part, room = numbers.float().chunk(size)[rank], torch.empty(sizes[0], device=chosen)
    equal = []

    def all_kinds() -> None:
        summed, gathered = (numbers + rank).float(), torch.empty_like(numbers.float())
        halves = (numbers % 8 + rank).bfloat16()
        for request in (
            link.all_reduce(group, summed),
            link.all_reduce(group, halves),
            link.reduce_scatter(group, (numbers + rank).float(), sizes, room),
            link.all_gather(group, part, sizes, gathered),
        ):
            link.wait(request)
        equal.append(torch.equal(summed, (size * numbers + total).float()))
        equal.append(torch.equal(halves, (size * (numbers % 8) + total).bfloat16()))
        equal.append(
            torch.equal(room, (size * numbers + total).float().chunk(size)[rank])
        )
        equal.append(torch.equal(gathered, numbers.float()))

    summed = numbers.float()

    def one() -> None:
        link.wait(link.all_reduce(group, summed.zero_()))
        if chosen.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        all_kinds()
        one()
    seconds = median_seconds(one, REPEATS, 2)
    on_device = transport.sums_on_device
    transport.close()
    return {
        "rank": rank,
        "seconds": seconds,
        "equal": all(equal),
        "on_device": on_device,
    }


def main() -> None:
    """Do what was asked and leave a report."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    device = torch.device(given["device"])
    work = {"steps": train, "messages": send_messages, "sums": sum_up}[given["kind"]]
    report = work(given, device)
    path = Path(given["into"]) / f"{report['rank']}.json"
    path.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
