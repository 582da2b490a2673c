"""The metrics of Keras that are means over samples, as expressions.

Example: `metrics=["accuracy"]` for ten classes gives
    (output.argmax(-1) == target).float().mean()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemsc.importers.keras.training.losses import (
    LOSSES,
    LossForm,
    ModelOutput,
    UnknownLossError,
    loss_form,
    snake,
)

Settings = Mapping[str, Any]


def metric_name(setting: Any) -> tuple[str, str, Settings]:
    """Return what a metric is called, its kind, and its settings."""
    if isinstance(setting, str):
        return setting, snake(setting), {}
    if not isinstance(setting, Mapping):
        raise UnknownLossError(f"the metric {setting!r} is not one of Keras")
    config = setting.get("config")
    if setting.get("class_name") == "function" or not isinstance(config, Mapping):
        raise UnknownLossError(f"the metric '{config}' is a function of your own")
    kind = snake(str(setting.get("class_name")))
    if kind == "mean_metric_wrapper" and isinstance(config.get("fn"), str):
        kind = snake(config["fn"])
    return str(config.get("name") or kind), kind, config


def metric_form(
    kind: str, settings: Settings, output: ModelOutput, target: str
) -> LossForm:
    """Return the body of a metric; `target` says what the loss is given.

    Raises:
        UnknownLossError: it is no mean over samples, or not in the table.
    """
    if kind in ("accuracy", "acc"):
        kind = _accuracy_of(output, target)
    if kind in METRICS:
        return LossForm(tuple(METRICS[kind](settings, output)))
    if kind in LOSSES:
        return loss_form(kind, {**settings, "reduction": None}, output)
    raise UnknownLossError(f"the metric {kind} is no mean over samples in PyTorch")


def _accuracy_of(output: ModelOutput, target: str) -> str:
    """Choose as Keras does, by the last axis and by what the targets are."""
    if output.channels == 1:
        return "binary_accuracy"
    if target == "indices":
        return "sparse_categorical_accuracy"
    return "categorical_accuracy"


def _binary(settings: Settings, output: ModelOutput) -> list[str]:
    threshold = float(settings.get("threshold", 0.5))
    shape = ".reshape(-1, 1)" if output.shape[1:] == (1,) else ""
    return [
        f"guess = (output > {threshold!r}).to(output.dtype)",
        f"return (guess == target{shape}).float().mean()",
    ]


def _cosine(settings: Settings, output: ModelOutput) -> list[str]:
    """Return the loss of that name, which has the other sign."""
    *lines, last = loss_form("cosine_similarity", settings, output).lines
    return [*lines, last.replace("return -", "return ")]


def _categorical(settings: Settings, output: ModelOutput) -> list[str]:
    dim = output.dim
    return [f"return (output.argmax({dim}) == target.argmax({dim})).float().mean()"]


def _sparse(settings: Settings, output: ModelOutput) -> list[str]:
    guess = f"output.argmax({output.dim})"
    if len(output.shape) == 2:
        return [f"return ({guess} == target.reshape(-1)).float().mean()"]
    return [
        f"guess = {guess}",
        "return (guess == target.reshape(guess.shape)).float().mean()",
    ]


def _top(settings: Settings, output: ModelOutput) -> list[str]:
    dim = output.dim
    return [f"target = target.argmax({dim})", *_top_sparse(settings, output)]


def _top_sparse(settings: Settings, output: ModelOutput) -> list[str]:
    """Count classes that are larger: as Keras does, equal ones are in the first k."""
    dim, count = output.dim, int(settings.get("k", 5))
    shape = ".reshape(-1)" if len(output.shape) == 2 else ""
    return [
        f"right = output.gather({dim}, target{shape}.long().unsqueeze({dim}))",
        f"return ((output > right).sum({dim}) < {count}).float().mean()",
    ]


METRICS: Mapping[str, Callable[[Settings, ModelOutput], list[str]]] = {
    "binary_accuracy": _binary,
    "categorical_accuracy": _categorical,
    "cosine_similarity": _cosine,
    "sparse_categorical_accuracy": _sparse,
    "sparse_top_k_categorical_accuracy": _top_sparse,
    "top_k_categorical_accuracy": _top,
}
