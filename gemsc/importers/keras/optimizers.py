"""The optimizers of Keras as `optimizer(params)`, and its schedules of rates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gemsc.importers.keras.config import class_and_config
from gemsc.importers.keras.losses import UnknownLossError

Config = Mapping[str, Any]


def optimizer_text(kind: str, config: Config) -> tuple[list[str], list[str]]:
    """Return functions `optimizer` and perhaps `scheduler`, and notes.

    Raises:
        UnknownLossError: PyTorch has no such optimizer or schedule.
    """
    if kind not in OPTIMIZERS:
        raise UnknownLossError(f"PyTorch has no {kind}")
    name, differs = OPTIMIZERS[kind]
    batches = int(config.get("gradient_accumulation_steps") or 1)
    rate, scheduler = schedule_text(config["learning_rate"], batches)
    decay = config.get("weight_decay")
    if kind == "Adam" and decay:
        name = "AdamW"
    extra, notes = _arguments(name, config), []
    if differs:
        notes.append(
            f"epsilon={config['epsilon']} of Keras {differs}, as if it were "
            f"{_weight(kind, config):.0e}: the same for gradients that are much larger"
        )
    if decay:
        extra += f", weight_decay={_number(decay)}"
        notes += _decay_notes(kind, config)
    elif name == "AdamW":
        extra += ", weight_decay=0.0"
    if scheduler and config.get("momentum"):
        notes.append(
            f"the momentum of {kind} holds rates of earlier steps in Keras, not in "
            "PyTorch: not the same while the rate changes"
        )
    notes += _other_notes(config)
    but = ", with differences: see import.toml" if notes else ""
    lines = [
        "def optimizer(params) -> torch.optim.Optimizer:",
        f'    """{kind} of Keras{but}."""',
        f"    return torch.optim.{name}(params, lr={_number(rate)}{extra})",
    ]
    return ["\n".join(lines), *scheduler], notes


def _weight(kind: str, config: Config) -> float:
    """Return the epsilon with which PyTorch would come near to what Keras' own does."""
    epsilon = float(config["epsilon"])
    if kind in ("Adam", "AdamW"):
        return epsilon / math.sqrt(1 - float(config["beta_2"]))
    return epsilon if kind == "Adamax" else math.sqrt(epsilon)


def _number(value: Any) -> str:
    """Return the shortest number that is this one in float32, as Keras keeps it."""
    return repr(float(str(np.float32(value))))


def _decay_notes(kind: str, config: Config) -> list[str]:
    is_plain = kind == "SGD" and not config.get("momentum")
    if is_plain or kind in ("Adam", "AdamW"):
        return []
    return [
        f"weight_decay={config['weight_decay']} of {kind} is taken from the weights in "
        "Keras; PyTorch adds it to the gradients: not the same"
    ]


def _other_notes(config: Config) -> list[str]:
    notes = []
    if config.get("global_clipnorm"):
        notes.append(f"gradients: gemsc run --clip-norm {config['global_clipnorm']}")
    for name in ("clipnorm", "clipvalue"):
        if config.get(name):
            notes.append(f"{name}={config[name]} of each gradient is left out")
    if config.get("use_ema"):
        notes.append(
            f"average of the weights: gemsc run --ema {config['ema_momentum']}, and "
            "gemsc export --ema"
        )
        if often := config.get("ema_overwrite_frequency"):
            notes.append(f"every {often} updates Keras alone makes it the weights")
    steps = config.get("gradient_accumulation_steps")
    if steps:
        notes.append(f"gradients of {steps} batches: gemsc run --accumulate {steps}")
    return notes


# ---------------------------------------------------------------------- each of them


# the settings of Keras that an argument of PyTorch's is, of whichever optimizer
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "alpha": ["rho"],
    "amsgrad": ["amsgrad"],
    "betas": ["beta_1", "beta_2"],
    "centered": ["centered"],
    "eps": ["epsilon"],
    "initial_accumulator_value": ["initial_accumulator_value"],
    "momentum": ["momentum"],
    "nesterov": ["nesterov"],
    "rho": ["rho"],
}
# what each is called in torch.optim, and what Keras does with its epsilon
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "SGD": ("SGD", ""),
    "Adam": ("Adam", "stands outside of the bias correction, in the first step"),
    "AdamW": ("AdamW", "stands outside of the bias correction, in the first step"),
    "RMSprop": ("RMSprop", "stands inside of the square root"),
    "Adagrad": ("Adagrad", "stands inside of the square root"),
    "Adadelta": ("Adadelta", ""),
    "Adamax": ("Adamax", "is added to the largest gradient, not to each"),
    "Nadam": ("NAdam", ""),
}


def _arguments(name: str, config: Config) -> str:
    """Return the arguments that are not as PyTorch has them by itself."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    text = ""
    for argument in (key for key in known if key in _ARGUMENTS):
        given = [config[key] for key in _ARGUMENTS[argument]]
        values = tuple(v if isinstance(v, bool) else float(v) for v in given)
        value = values if argument == "betas" else values[0]
        if argument == "nesterov" and not config["momentum"]:
            continue  # neither of the two has it then
        if value != known[argument].default:
            text += f", {argument}={value!r}"
    return text + ", momentum_decay=1.0" * (name == "NAdam")


# --------------------------------------------------------------------------- schedules


# both count from 0, so that the rates of all steps are the same
def schedule_text(setting: Any, batches: int = 1) -> tuple[float, list[str]]:
    """Return the rate of the optimizer, and `scheduler` if the rate changes.

    Keras counts batches, of which an update may have several, and takes the last one's.

    Raises:
        UnknownLossError: it is a schedule of somebody's own.
    """
    if not isinstance(setting, Mapping):
        return float(setting), []
    kind, config = class_and_config(setting)
    if kind not in SCHEDULES:
        raise UnknownLossError(f"the schedule {kind} is not one of Keras")
    start, body = SCHEDULES[kind](config)
    base = start or 1.0  # what the rates are divided by
    at = "step" if batches == 1 else f"{batches} * step + {batches - 1}"
    lines = [
        "def scheduler(optimizer: torch.optim.Optimizer)"
        " -> torch.optim.lr_scheduler.LRScheduler:",
        f'    """{kind} of Keras."""',
        "",
        "    def rate(step: int) -> float:",
        *(f"        {line}" for line in body),
        "",
        "    return torch.optim.lr_scheduler.LambdaLR(",
        f"        optimizer, lambda step: rate({at}) / {base!r}",
        "    )",
    ]
    return base, ["\n".join(lines)]


def _start(config: Config) -> float:
    return float(config["initial_learning_rate"])


def _decay(template: str, config: Config) -> tuple[float, list[str]]:
    start, rate = _start(config), float(config["decay_rate"])
    sign = "//" if config.get("staircase") else "/"
    steps = f"(step {sign} {config['decay_steps']:d})"
    return start, [f"return {template.format(start=start, rate=rate, steps=steps)}"]


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
    "ExponentialDecay": partial(_decay, "{start!r} * {rate!r} ** {steps}"),
    "InverseTimeDecay": partial(_decay, "{start!r} / (1 + {rate!r} * {steps})"),
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
