"""How ranks of torch.distributed find each other: their store, and the network."""

from __future__ import annotations

import contextlib
import os
import socket
from functools import cache
from ipaddress import ip_address
from typing import Any

from torch import distributed as torch_distributed

from gemsc.base.process import (
    STORE_VARIABLE,
    TORCHRUN,
)

dist: Any = torch_distributed  # its stores and process groups have no types

UDP = socket.SOCK_DGRAM
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # as everywhere in torch.distributed


@cache
def meet() -> tuple[Any, int, int]:
    """Return where ranks find each other, this one's number, and how many there are."""
    if TORCHRUN in os.environ:
        meeting: tuple[Any, int, int] = next(iter(dist.rendezvous("env://")))
        return meeting
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.FileStore(os.environ[STORE_VARIABLE], size), rank, size


def network(*, is_alone: bool) -> Any:
    """Return what gloo listens on: nothing but loopback if no other machine is there.

    Else it is the address that reaches the first machine. The interface that the user
    names wins.
    """
    gloo, named = dist.ProcessGroupGloo, os.environ.get(INTERFACE, "")
    if named:
        return gloo.create_device(interface=named.split(",")[0])
    if is_alone:
        return gloo.create_device(hostname=LOOPBACK)
    if address := _address_towards(os.environ.get("MASTER_ADDR", "")):
        return gloo.create_device(hostname=address)
    return gloo.create_default_device()


def _address_towards(host: str) -> str | None:
    """Return this machine's address in the network of a host; None for loopback.

    What gloo takes by default is that of this machine's own name: where nobody knows
    that name, loopback.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=UDP):
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # UDP: nothing is sent
                address = str(probe.getsockname()[0])
            if not ip_address(address).is_loopback:
                return address
    return None
