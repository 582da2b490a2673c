"""The options of `gemsc run` itself; all others are the ranks'."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsc.errors import GemscError
from gemsc.launch.hosts import Host, parse_hosts, read_hostfile
from gemsc.runtime.training.arguments import Parser, make_parser, parse_arguments


@dataclass(frozen=True)
class Launch:
    """How the ranks are started: on which hosts, and how often again."""

    hosts: tuple[Host, ...] = ()
    restarts: int = 0


def read_launch(
    arguments: Sequence[str],
) -> tuple[Launch, list[str], argparse.Namespace]:
    """Return how to start the ranks, their arguments, and these as the ranks read them.

    Raises:
        GemscError: an option is unknown or wrong, or a host.
    """
    parser = _launch_parser()
    own, rest = parser.parse_known_args(arguments)
    options = parse_arguments(rest, parents=[parser])
    hosts: tuple[Host, ...] = ()
    if own.hosts is not None and own.hostfile is not None:
        raise GemscError("--hosts and --hostfile are given", help="leave out one")
    if own.hosts is not None:
        hosts = parse_hosts(own.hosts)
    elif own.hostfile is not None:
        hosts = read_hostfile(own.hostfile)
    if own.restarts and getattr(options, "checkpoint_every", None) == "never":
        raise GemscError(
            "--restarts has no checkpoint to go on from with --checkpoint-every never",
            help="leave one of them out",
        )
    return Launch(hosts, own.restarts), rest, options


def run_parser() -> Parser:
    """Return what reads all options of `gemsc run`: those of ranks, and its own."""
    return make_parser(parents=[_launch_parser()])


def _launch_parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("starting the ranks")
    group.add_argument("--hosts", help="hosts and how many ranks each takes: a:2,b:2")
    group.add_argument(
        "--hostfile", type=Path, help="file with one line `a slots=2` per host"
    )
    group.add_argument(
        "--restarts",
        type=_number,
        default=0,
        help="restarts from the last checkpoint when a rank dies (default: 0)",
    )
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)
