"""The losses of Keras as bodies of `loss(output, target)`, and metrics likewise.

Example: `loss="mse"` gives
    return F.mse_loss(output, target)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gemsc.importers.keras.config import snake


@dataclass(frozen=True)
class ModelOutput:
    """An output of the model: its name, its sizes in model.py, and how to get it.

    `place` is the text behind `output` and `target`: "", "[0]" or '["mask"]'. With
    `first` it has its channels first, where Keras has them last.
    """

    name: str
    shape: tuple[int, ...]
    place: str = ""
    first: bool = False

    @property
    def dim(self) -> int:
        """The dimension that is the last axis of Keras."""
        return 1 if self.first else -1

    def at(self, axis: int) -> int:
        """Return the dimension that is an axis of Keras."""
        rank = len(self.shape)
        return [0, *range(2, rank), 1][axis] if self.first else range(rank)[axis]

    @property
    def channels(self) -> int:
        """The size of that."""
        return self.shape[self.dim]


class UnknownLossError(Exception):
    """A loss, optimizer or schedule that has no counterpart; the reason is its text."""


@dataclass(frozen=True)
class LossForm:
    """The lines of a body, and what its targets are: values, one-hot or indices.

    `whole` are losses of a batch that are not means over its samples. `count` says how
    many losses the mean is of, where these are not one for each row of the last axis.
    """

    lines: tuple[str, ...]
    target: str = "values"
    whole: bool = False
    count: str = ""


Settings = Mapping[str, Any]
ALIASES = {
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "msle": "mean_squared_logarithmic_error",
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "kullback_leibler_divergence": "kl_divergence",
    "logcosh": "log_cosh",
}
SMALL = "1e-7"  # keras.config.epsilon()


def full_name(name: str) -> str:
    """Return mean_squared_error for MeanSquaredError and for mse."""
    return ALIASES.get(name.lower()) or snake(name.replace("KLD", "KlD"))


def kind_and_settings(setting: Any) -> tuple[str, Settings]:
    """Return which loss or metric a setting of compile() is, and its settings.

    Raises:
        UnknownLossError: it is a function of the user's.
    """
    if isinstance(setting, str):
        return full_name(setting), {}
    config = setting.get("config") if isinstance(setting, Mapping) else setting
    if not isinstance(config, Mapping):
        raise UnknownLossError(f"'{config}' is a function of your own")
    kind, function = str(setting.get("class_name")), config.get("fn")
    if kind in ("LossFunctionWrapper", "MeanMetricWrapper"):
        kind = function if isinstance(function, str) else kind
    return full_name(kind), config


def loss_form(name: str, settings: Settings, output: ModelOutput) -> LossForm:
    """Return the body of a loss, for an output.

    Raises:
        UnknownLossError: the table has none.
    """
    if name not in LOSSES:
        raise UnknownLossError(f"{name} has no counterpart in the table of gemsc")
    write = LOSSES[name]
    if isinstance(write, str):
        write = partial(_plain, write)
    form = write(settings, output)
    return _reduced(form, str(settings.get("reduction")), output)


def _reduced(form: LossForm, reduction: str, output: ModelOutput) -> LossForm:
    """Make a sum of a mean, where Keras is asked for it."""
    if reduction != "sum":
        return form
    *lines, last = form.lines
    mean = last.removeprefix("return ")
    count = form.count or f"output.numel() / {output.channels}"
    return LossForm((*lines, f"return {mean} * ({count})"), form.target, True)


# --------------------------------------------------------------------- of values


def _as_output(output: ModelOutput) -> str:
    """Return the line that gives the target the output's type, and its last axis."""
    return f"target = {_aligned('target', output)}.to(output.dtype)"


def _aligned(target: str, output: ModelOutput) -> str:
    """Return a target with as many axes as the output: labels (n,) for (n, 1)."""
    rank = len(output.shape)
    if rank == 1:
        return f"{target}.reshape(-1)"
    if rank == 2 and output.channels == 1:
        return f"{target}.reshape(-1, 1)"
    if output.channels > 1:
        return target
    longer = f"{target}.unsqueeze({output.dim})"
    return f"({longer} if {target}.dim() == {rank - 1} else {target})"


def _plain(text: str, settings: Settings, output: ModelOutput) -> LossForm:
    """Return lines, in which {dim} is the last axis of Keras."""
    delta = float(settings.get("delta", 1.0))
    filled = text.format(dim=output.dim, small=SMALL, delta=delta)
    return LossForm((_as_output(output), *filled.split("\n")))


def _cosine(settings: Settings, output: ModelOutput) -> LossForm:
    axis = int(settings.get("axis", -1))
    dim = output.at(axis)
    lines = (
        _as_output(output),
        f"target = F.normalize(target, dim={dim}, eps={SMALL})",
        f"output = F.normalize(output, dim={dim}, eps={SMALL})",
        f"return -(target * output).sum({dim}).mean()",
    )
    return LossForm(lines)


def _overlap(formula: str, settings: Settings, output: ModelOutput) -> LossForm:
    """Sum over axes: over the whole batch if there are none."""
    axis = settings.get("axis")
    dims = ""
    if axis is not None:
        axes = axis if isinstance(axis, list | tuple) else [axis]
        at = tuple(output.at(int(a)) for a in axes)
        dims = str(at)
    alpha, beta = (float(settings.get(k, 0.5)) for k in ("alpha", "beta"))
    lines = formula.format(dims=dims, small=SMALL, alpha=alpha, beta=beta)
    whole = axis is None or 0 in at
    text = (_as_output(output), *lines.split("\n"))
    return LossForm(text, whole=whole, count="both.numel()")


DICE = """both = (target * output).sum({dims})
total = target.sum({dims}) + output.sum({dims})
return (1 - 2 * both / (total + {small})).mean()"""
TVERSKY = """both = (target * output).sum({dims})
missed = (target * (1 - output)).sum({dims})
wrong = (output * (1 - target)).sum({dims})
total = both + {alpha!r} * missed + {beta!r} * wrong
return (1 - both / (total + {small})).mean()"""


# ------------------------------------------------------------------------ of classes


def _smoothed(settings: Settings, of_classes: int) -> list[str]:
    """Return the line that takes a part of the target away for the other classes."""
    part = float(settings.get("label_smoothing") or 0.0)
    if not part:
        return []
    return [f"target = target * {1.0 - part!r} + {part / of_classes!r}"]


def _binary(settings: Settings, output: ModelOutput) -> LossForm:
    lines = [_as_output(output), *_smoothed(settings, 2)]
    if settings.get("from_logits"):
        text = "F.binary_cross_entropy_with_logits(output, target)"
    else:
        lines.append(f"output = output.clamp({SMALL}, 1 - {SMALL})")
        text = "F.binary_cross_entropy(output, target)"
    return LossForm((*lines, f"return {text}"))


def _binary_focal(settings: Settings, output: ModelOutput) -> LossForm:
    alpha, gamma = float(settings.get("alpha", 0.25)), float(settings.get("gamma", 2))
    lines = [_as_output(output), *_smoothed(settings, 2)]
    if settings.get("from_logits"):
        lines.append("output = torch.sigmoid(output)")
    lines += [
        f"clamped = output.clamp({SMALL}, 1 - {SMALL})",
        'each = F.binary_cross_entropy(clamped, target, reduction="none")',
        "right = target * output + (1 - target) * (1 - output)",
        f"each = each * (1 - right) ** {gamma!r}",
    ]
    if settings.get("apply_class_balancing"):
        weight = f"target * {alpha!r} + (1 - target) * {1 - alpha!r}"
        lines.append(f"each = each * ({weight})")
    return LossForm((*lines, "return each.mean()"))


def _class_dim(settings: Settings, output: ModelOutput) -> int:
    dim = output.at(int(settings.get("axis", -1)))
    return dim if output.first else dim - len(output.shape)


def _shares(dim: int) -> list[str]:
    """Return the lines that make probabilities of an output that has them."""
    return [
        f"output = output / output.sum({dim}, keepdim=True)",
        f"output = output.clamp({SMALL}, 1 - {SMALL})",
    ]


def _categorical(settings: Settings, output: ModelOutput) -> LossForm:
    dim = _class_dim(settings, output)
    classes = output.shape[dim]
    if settings.get("from_logits"):
        part = float(settings.get("label_smoothing") or 0.0)
        smoothing = f", label_smoothing={part!r}" if part else ""
        values = [_classes_at_1(name, dim, output) for name in ("output", "target")]
        lines = [
            "target = target.to(output.dtype)",
            f"return F.cross_entropy({', '.join(values)}{smoothing})",
        ]
    else:
        lines = ["target = target.to(output.dtype)", *_smoothed(settings, classes)]
        lines += [*_shares(dim), f"return -(target * output.log()).sum({dim}).mean()"]
    return LossForm(tuple(lines), "one-hot", count=f"output.numel() / {classes}")


def _categorical_focal(settings: Settings, output: ModelOutput) -> LossForm:
    dim = _class_dim(settings, output)
    classes = output.shape[dim]
    alpha, gamma = float(settings.get("alpha", 0.25)), float(settings.get("gamma", 2))
    lines = ["target = target.to(output.dtype)", *_smoothed(settings, classes)]
    if settings.get("from_logits"):
        lines.append(f"output = F.softmax(output, {dim})")
    lines += [
        *_shares(dim),
        f"weight = {alpha!r} * (1 - output) ** {gamma!r}",
        f"return -(weight * target * output.log()).sum({dim}).mean()",
    ]
    return LossForm(tuple(lines), "one-hot", count=f"output.numel() / {classes}")


def _sparse(settings: Settings, output: ModelOutput) -> LossForm:
    """Take indices of classes, of shape (n,) or (n, 1)."""
    dim = _class_dim(settings, output)
    ignored = settings.get("ignore_class")
    extra = "" if ignored is None else f", ignore_index={int(ignored)}"
    count = "" if ignored is None else f"(target != {int(ignored)}).sum()"
    lines = [_indices(output, dim)]
    value = _classes_at_1("output", dim, output)
    if settings.get("from_logits"):
        lines.append(f"return F.cross_entropy({value}, target{extra})")
    else:
        value = _classes_at_1("output.log()", dim, output)
        if "permute" in value:
            value += ".contiguous()"  # PyTorch's nll_loss has no gradient without
        lines += [*_shares(dim), f"return F.nll_loss({value}, target{extra})"]
    return LossForm(tuple(lines), "indices", count=count)


def _generalized(settings: Settings, output: ModelOutput) -> LossForm:
    q, dim = float(settings.get("q", 0.5)), output.dim
    lines = (
        _indices(output, dim),
        f"right = output.gather({dim}, target.unsqueeze({dim}))",
        f"return ((1 - right**{q!r}) / {q!r}).mean()",
    )
    return LossForm(lines, "indices")


def _indices(output: ModelOutput, dim: int) -> str:
    """Return the line that makes the target indices, without an axis of size 1."""
    rank = len(output.shape)
    if rank == 2:
        return "target = target.reshape(-1).long()"
    return (
        f"target = (target.squeeze({dim}) if target.dim() == {rank} else target).long()"
    )


def _classes_at_1(text: str, dim: int, output: ModelOutput) -> str:
    rank = len(output.shape)
    at = dim % rank
    others = [axis for axis in range(1, rank) if axis != at]
    axes = ", ".join(map(str, [0, at, *others]))
    return text if at == 1 else f"{text}.permute({axes})"


# ---------------------------------------------------------------------------- table


PERCENT = (
    "return 100 * ((target - output).abs() / target.abs().clamp(min={small})).mean()"
)
LOGARITHMIC = """output = (output.clamp(min={small}) + 1).log()
target = (target.clamp(min={small}) + 1).log()
return F.mse_loss(output, target)"""
LOG_COSH = """error = output - target
return (error + F.softplus(-2 * error) - math.log(2)).mean()"""
DIVERGENCE = """target = target.clamp({small}, 1)
output = output.clamp({small}, 1)
return (target * (target / output).log()).sum({dim}).mean()"""
# labels of 0 and 1 mean -1 and 1
SIGNS = """binary = ((target == 0) | (target == 1)).all()
target = torch.where(binary, 2 * target - 1, target)
"""
CATEGORICAL_HINGE = """right = (target * output).sum({dim})
wrong = ((1 - target) * output).amax({dim})
return F.relu(wrong - right + 1).mean()"""

# by a text for what is one for all settings and outputs
LOSSES: Mapping[str, str | Callable[[Settings, ModelOutput], LossForm]] = {
    "binary_crossentropy": _binary,
    "binary_focal_crossentropy": _binary_focal,
    "categorical_crossentropy": _categorical,
    "categorical_focal_crossentropy": _categorical_focal,
    "categorical_generalized_cross_entropy": _generalized,
    "categorical_hinge": CATEGORICAL_HINGE,
    "cosine_similarity": _cosine,
    "dice": partial(_overlap, DICE),
    "hinge": SIGNS + "return F.relu(1 - target * output).mean()",
    "huber": "return F.huber_loss(output, target, delta={delta!r})",
    "kl_divergence": DIVERGENCE,
    "log_cosh": LOG_COSH,
    "mean_absolute_error": "return F.l1_loss(output, target)",
    "mean_absolute_percentage_error": PERCENT,
    "mean_squared_error": "return F.mse_loss(output, target)",
    "mean_squared_logarithmic_error": LOGARITHMIC,
    "poisson": "return (output - target * (output + {small}).log()).mean()",
    "sparse_categorical_crossentropy": _sparse,
    "squared_hinge": SIGNS + "return (F.relu(1 - target * output) ** 2).mean()",
    "tversky": partial(_overlap, TVERSKY),
}
# settings that get_config() of Keras leaves out, and what they are then
UNSAVED = {"cosine_similarity": ("axis", -1), "huber": ("delta", 1.0)}


# ------------------------------------------------ metrics, that are means over samples


def metric_form(
    kind: str, settings: Settings, output: ModelOutput, target: str
) -> LossForm:
    """Return the body of a metric; `target` says what the loss is given.

    Raises:
        UnknownLossError: it is not a mean over samples, or not in the table.
    """
    if kind in ("accuracy", "acc") and not settings:
        kind = _accuracy_of(output, target)
    if kind == "accuracy":  # the class of that name: the share of equal numbers
        return _plain("return (output == target).float().mean()", settings, output)
    if kind in METRICS:
        return LossForm(tuple(METRICS[kind](settings, output)))
    if kind in LOSSES:
        return loss_form(kind, {**settings, "reduction": None}, output)
    raise UnknownLossError(f"the metric {kind} is not a mean over samples in PyTorch")


def _accuracy_of(output: ModelOutput, target: str) -> str:
    """Choose as Keras does, by the last axis and by what the targets are."""
    if output.channels == 1:
        return "binary_accuracy"
    if target == "indices":
        return "sparse_categorical_accuracy"
    return "categorical_accuracy"


def _binary_metric(settings: Settings, output: ModelOutput) -> list[str]:
    threshold = float(settings.get("threshold", 0.5))
    return [
        f"guess = (output > {threshold!r}).to(output.dtype)",
        f"return (guess == {_aligned('target', output)}).float().mean()",
    ]


def _cosine_metric(settings: Settings, output: ModelOutput) -> list[str]:
    """Return the loss of that name, which has the other sign."""
    *lines, last = loss_form("cosine_similarity", settings, output).lines
    return [*lines, last.replace("return -", "return ")]


def _categorical_metric(settings: Settings, output: ModelOutput) -> list[str]:
    dim = output.dim
    return [f"return (output.argmax({dim}) == target.argmax({dim})).float().mean()"]


def _sparse_metric(settings: Settings, output: ModelOutput) -> list[str]:
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
    "binary_accuracy": _binary_metric,
    "categorical_accuracy": _categorical_metric,
    "cosine_similarity": _cosine_metric,
    "sparse_categorical_accuracy": _sparse_metric,
    "sparse_top_k_categorical_accuracy": _top_sparse,
    "top_k_categorical_accuracy": _top,
}
