"""Learning rates: Keras' schedules as `scheduler(optimizer)`.

Both count updates from 0, so that the rates of all steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemsc.importers.keras.training.losses import UnknownLossError

Config = Mapping[str, Any]


def schedule_text(setting: Any) -> tuple[float, list[str]]:
    """Return the rate of the optimizer, and `scheduler` if the rate changes.

    Raises:
        UnknownLossError: it is a schedule of somebody's own.
    """
    if not isinstance(setting, Mapping):
        return float(setting), []
    kind, config = str(setting.get("class_name")), setting.get("config")
    if kind not in SCHEDULES or not isinstance(config, Mapping):
        raise UnknownLossError(f"the schedule {kind} is not one of Keras")
    start, body = SCHEDULES[kind](config)
    base = start or 1.0  # what the rates are divided by
    lines = [
        "def scheduler(optimizer: torch.optim.Optimizer)"
        " -> torch.optim.lr_scheduler.LRScheduler:",
        f'    """{kind} of Keras."""',
        "",
        "    def rate(step: int) -> float:",
        *(f"        {line}" for line in body),
        "",
        "    return torch.optim.lr_scheduler.LambdaLR(",
        f"        optimizer, lambda step: rate(step) / {base!r}",
        "    )",
    ]
    return base, ["\n".join(lines)]


def _start(config: Config) -> float:
    return float(config["initial_learning_rate"])


def _part(config: Config, steps: str = "decay_steps") -> str:
    """Return how far the step is, in units of the decay's steps."""
    sign = "//" if config.get("staircase") else "/"
    return f"step {sign} {config[steps]:d}"


def _exponential(config: Config) -> tuple[float, list[str]]:
    start, rate = _start(config), float(config["decay_rate"])
    return start, [f"return {start!r} * {rate!r} ** ({_part(config)})"]


def _inverse(config: Config) -> tuple[float, list[str]]:
    start, rate = _start(config), float(config["decay_rate"])
    return start, [f"return {start!r} / (1 + {rate!r} * ({_part(config)}))"]


def _piecewise(config: Config) -> tuple[float, list[str]]:
    values = [float(value) for value in config["values"]]
    ends = [int(end) for end in config["boundaries"]]
    return values[0], [
        f"values = {values}",
        f"return values[sum(step > end for end in {ends})]",
    ]


def _polynomial(config: Config) -> tuple[float, list[str]]:
    start, end = _start(config), float(config["end_learning_rate"])
    steps, power = int(config["decay_steps"]), float(config["power"])
    if config.get("cycle"):
        body = [
            f"steps = {steps} * max(1, math.ceil(step / {steps}))",
            f"left = (1 - step / steps) ** {power!r}",
        ]
    else:
        body = [f"left = (1 - min(step, {steps}) / {steps}) ** {power!r}"]
    return start, [*body, f"return ({start!r} - {end!r}) * left + {end!r}"]


def _cosine(config: Config) -> tuple[float, list[str]]:
    start, alpha = _start(config), float(config.get("alpha") or 0.0)
    steps, warmup = int(config["decay_steps"]), int(config.get("warmup_steps") or 0)
    target = config.get("warmup_target")
    body = []
    if target is not None and warmup:
        peak = float(target)
        body = [
            f"if step < {warmup}:",
            f"    return {start!r} + ({peak!r} - {start!r}) * step / {warmup}",
            f"step -= {warmup}",
        ]
        start = peak
    body += [
        f"wave = (1 + math.cos(math.pi * min(step, {steps}) / {steps})) / 2",
        f"return {start!r} * ({1 - alpha!r} * wave + {alpha!r})",
    ]
    return start, body


def _restarts(config: Config) -> tuple[float, list[str]]:
    start, alpha = _start(config), float(config.get("alpha") or 0.0)
    longer, lower = float(config["t_mul"]), float(config["m_mul"])
    return start, [
        f"length, height = {int(config['first_decay_steps'])}.0, 1.0",
        "while step >= length:",
        f"    step, length, height = step - length, length * {longer!r}, "
        f"height * {lower!r}",
        "wave = height * (1 + math.cos(math.pi * step / length)) / 2",
        f"return {start!r} * ({1 - alpha!r} * wave + {alpha!r})",
    ]


SCHEDULES: Mapping[str, Callable[[Config], tuple[float, list[str]]]] = {
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
