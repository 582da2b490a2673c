"""Calls by kind: a layer, a function and a method that do the same are one kind."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

import gemsc.nn

_MAX_POOL = "input kernel_size stride padding dilation ceil_mode return_indices"
_FUNCTIONS_OF_RANK = {
    "conv": "input weight bias stride padding dilation groups",
    "conv_transpose": (
        "input weight bias stride padding output_padding groups dilation"
    ),
    "max_pool": _MAX_POOL,
    "max_unpool": "input indices kernel_size stride padding output_size",
    "avg_pool": (
        "input kernel_size stride padding ceil_mode count_include_pad divisor_override"
    ),
    "lp_pool": "input norm_type kernel_size stride ceil_mode",
    "adaptive_avg_pool": "input output_size return_indices",
    "adaptive_max_pool": "input output_size return_indices",
}
_INTERPOLATE = (
    "input size scale_factor mode align_corners recompute_scale_factor antialias"
)
_BATCH_NORM = "input running_mean running_var weight bias training momentum eps"
_INSTANCE_NORM = (
    "input running_mean running_var weight bias use_input_stats momentum eps"
)
_LOSS = "input target size_average reduce reduction"
_WEIGHTED = "input target weight size_average reduce reduction"
_CROSS_ENTROPY = (
    "input target weight size_average ignore_index reduce reduction label_smoothing"
)
_REDUCTION = "input dim keepdim dtype"
_EMBEDDING = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
_ATTENTION = "query key value attn_mask dropout_p is_causal scale enable_gqa"


@dataclass(frozen=True)
class Call:
    """One node: its kind, its arguments by name, and the layer if it calls one.

    A layer's settings count as arguments; its parameters do not. `names` are those of
    what the call itself may be given, in order. `groups` are the settings of a function
    that are a shard's own: how many groups of channels it has.
    """

    node: fx.Node
    kind: str
    arguments: dict[str, Any]
    layer: nn.Module | None = None
    names: tuple[str, ...] = ()
    detail: str = ""  # of the kind: the rank of windows, the mode of a padding layer
    groups: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default if it was not given."""
        value = self.arguments.get(name)
        return default if value is None else value

    @property
    def rank(self) -> int:
        """The number of dimensions that a window moves over."""
        return int(self.detail)

    @property
    def input(self) -> fx.Node:
        """The first tensor."""
        node = self.arguments["input"]
        assert isinstance(node, fx.Node)
        return node


def call_of(node: fx.Node, module: nn.Module, alike: Any = None) -> Call:
    """Return a node's kind ("" if it has none) and its arguments by name.

    `alike` is a function that takes the same, of a node whose own has no kind.
    """
    if node.op == "call_module":
        return _describe_layer(node, module.get_submodule(str(node.target)))
    table = _ALIKE if node.op == "call_method" else FUNCTIONS
    target: Any = alike or node.target
    try:
        kind, names = table.get(target, ("", ""))
    except TypeError:  # not hashable
        kind, names = "", ""
    order = tuple(names.split())
    arguments = dict(zip(order, node.args, strict=False))
    arguments |= {_renamed(name): value for name, value in node.kwargs.items()}
    kind, _, detail = kind.partition(":")
    return Call(node, kind, arguments, names=order, detail=detail)


def _describe_layer(node: fx.Node, layer: nn.Module) -> Call:
    if type(layer) not in LAYERS:
        return Call(node, "", {}, layer)
    kind, settings = LAYERS[type(layer)]
    arguments = {
        name: getattr(layer, attribute)
        for name, attribute in (_pair(word) for word in settings.split())
    }
    signature = inspect.signature(layer.forward)
    bound = signature.bind(*node.args, **node.kwargs).arguments
    arguments |= {_renamed(name): value for name, value in bound.items()}
    names = tuple(map(_renamed, signature.parameters))
    kind, _, detail = kind.partition(":")
    return Call(node, kind, arguments, layer, names, detail)


def _renamed(name: str) -> str:
    return _OTHER_NAMES.get(name, name)


# nn.RMSNorm calls its input x; PyTorch takes NumPy's names as well as its own
_OTHER_NAMES = {
    "x": "input",
    "x1": "input",
    "x2": "other",
    "axis": "dim",
    "keepdims": "keepdim",
    "train": "training",
}


def numbered(given: Any, count: int) -> set[int] | None:
    """Return dimensions as numbers from the first; None for anything else."""
    numbers = given if isinstance(given, tuple | list) else [given]
    if not numbers or any(type(number) is not int for number in numbers):
        return None
    return {number % count for number in numbers}


def _pair(word: str) -> tuple[str, str]:
    """Return ("kernel_size", "kernel_size"), or ("padding", "p") for `padding:p`."""
    name, _, attribute = word.partition(":")
    return name, attribute or name


# Operations that work along `dim` and leave the other dimensions alone.
ALONG = {
    **dict.fromkeys(
        [
            "softmin",
            "argmax",
            "argmin",
            "cumsum",
            "cumprod",
            "logsumexp",
            "sort",
            "prod",
            "all",
            "any",
            "glu",
            "index_select",
        ],
        "input dim",
    ),
    "topk": "input k dim",
    "repeat_interleave": "input repeats dim",
    "norm": "input p dim",
    "normalize": "input p dim",
}
# Operations that reduce dimensions, and others whose functions and methods are alike.
_ALIKE = {
    "mean": ("mean", _REDUCTION),
    "sum": ("sum", _REDUCTION),
    "amax": ("amax", "input dim keepdim"),
    "amin": ("amin", "input dim keepdim"),
    "max": ("max", "input dim keepdim"),
    "min": ("min", "input dim keepdim"),
    "var": ("var", "input dim unbiased keepdim correction"),
    "std": ("std", "input dim unbiased keepdim correction"),
    "index_add": ("index_add", "input dim index source alpha"),
    "narrow": ("narrow", "input dim start length"),
    "repeat": ("repeat", "input repeats"),
    "tile": ("repeat", "input dims"),
    "prelu": ("channels", "input weight"),
    "matmul": ("matmul", "input other"),
    "bmm": ("matmul", "input other"),
    "mm": ("matmul", "input other"),
    "addmm": ("addmm", "input mat1 mat2 beta alpha"),
    "baddbmm": ("addmm", "input batch1 batch2 beta alpha"),
    "chunk": ("chunk", "input chunks dim"),
    "split": ("split", "input split_size dim"),
    "unbind": ("unbind", "input dim"),
    "roll": ("roll", "input shifts dim"),
    "flip": ("flip", "input dims"),
    "softmax": ("softmax", "input dim dtype"),
    "log_softmax": ("log_softmax", "input dim dtype"),
    **{name: (name, names) for name, names in ALONG.items()},
}


def _functions() -> Iterator[tuple[Any, str, str]]:
    for rank in (1, 2, 3):
        for kind, names in _FUNCTIONS_OF_RANK.items():
            yield f"{kind}{rank}d", f"{kind}:{rank}", names
        yield f"max_pool{rank}d_with_indices", f"max_pool:{rank}", _MAX_POOL
        yield f"dropout{rank}d", f"channel_dropout:{rank}", "input p training inplace"
    yield "feature_dropout", "channel_dropout", "input p training"
    yield "feature_alpha_dropout", "channel_dropout", "input p training inplace"
    yield "interpolate", "interpolate", _INTERPOLATE
    yield "pad", "pad", "input pad mode value"
    yield "pixel_shuffle", "pixel_shuffle", "input upscale_factor"
    yield "pixel_unshuffle", "pixel_unshuffle", "input downscale_factor"
    yield "channel_shuffle", "channels", "input groups"
    yield "local_response_norm", "channels", "input size alpha beta k"
    yield "batch_norm", "batch_norm", _BATCH_NORM
    yield "group_norm", "group_norm", "input num_groups weight bias eps"
    yield "instance_norm", "instance_norm", _INSTANCE_NORM
    yield "layer_norm", "layer_norm", "input normalized_shape weight bias eps"
    yield "dropout", "dropout", "input p training inplace"
    yield "rms_norm", "rms_norm", "input normalized_shape weight eps"
    yield "linear", "linear", "input weight bias"
    yield "einsum", "einsum", "equation"
    yield "embedding", "embedding", _EMBEDDING
    yield "embedding_bag", "embedding_bag", "input weight offsets max_norm"
    yield "scaled_dot_product_attention", "attention", _ATTENTION
    for name in ("cat", "concat", "concatenate"):
        yield name, "cat", "tensors dim"
    yield "stack", "stack", "tensors dim"
    for name, (kind, names) in _ALIKE.items():
        yield name, kind, names
    yield "mse_loss", "loss", _LOSS
    yield "l1_loss", "loss", _LOSS
    yield "smooth_l1_loss", "loss", f"{_LOSS} beta"
    yield "huber_loss", "loss", "input target reduction delta"
    yield "binary_cross_entropy", "loss", _WEIGHTED
    yield "binary_cross_entropy_with_logits", "loss", f"{_WEIGHTED} pos_weight"
    yield "cross_entropy", "cross_entropy", _CROSS_ENTROPY


FUNCTIONS: dict[Any, tuple[str, str]] = {
    function: (kind, names)
    for name, kind, names in _functions()
    for function in (getattr(torch, name, None), getattr(F, name, None))
    if function is not None
}
_STATISTICS = "running_mean running_var"
# In `torch` some take their arguments in another order than in `torch.nn.functional`.
FUNCTIONS |= {
    operator.matmul: ("matmul", "input other"),
    torch.batch_norm: (
        "batch_norm",
        f"input weight bias {_STATISTICS} training momentum eps",
    ),
    torch.instance_norm: (
        "instance_norm",
        f"input weight bias {_STATISTICS} use_input_stats momentum eps",
    ),
    torch.embedding: (
        "embedding",
        "weight input padding_idx scale_grad_by_freq sparse",
    ),
    torch.embedding_bag: (
        "embedding_bag",
        "weight input offsets scale_grad_by_freq mode sparse",
    ),
    F.softmax: ("softmax", "input dim _stacklevel dtype"),
    F.log_softmax: ("log_softmax", "input dim _stacklevel dtype"),
}
del FUNCTIONS[torch.binary_cross_entropy_with_logits]


_WINDOW = "kernel_size stride padding"
_UPSAMPLE = "size scale_factor mode align_corners recompute_scale_factor"
# layers of images of one, two and three dimensions: the start of the class's name
_LAYERS_OF_RANK = {
    "Conv": ("conv", f"{_WINDOW} dilation groups padding_mode"),
    "ConvTranspose": (
        "conv_transpose",
        f"{_WINDOW} dilation groups padding_mode output_padding",
    ),
    "MaxPool": ("max_pool", f"{_WINDOW} dilation ceil_mode return_indices"),
    "MaxUnpool": ("max_unpool", _WINDOW),
    "AvgPool": ("avg_pool", f"{_WINDOW} ceil_mode count_include_pad"),
    "LPPool": ("lp_pool", "norm_type kernel_size stride ceil_mode"),
    "AdaptiveAvgPool": ("adaptive_avg_pool", "output_size"),
    "AdaptiveMaxPool": ("adaptive_max_pool", "output_size return_indices"),
    "Dropout": ("channel_dropout", "p"),
}
_PADDING = {
    "ZeroPad": "constant",
    "ConstantPad": "constant",
    "ReflectionPad": "reflect",
    "ReplicationPad": "replicate",
    "CircularPad": "circular",
}


def _layers() -> Iterator[tuple[type[nn.Module], str, str]]:
    for rank in (1, 2, 3):
        for name, (kind, settings) in _LAYERS_OF_RANK.items():
            if name == "AvgPool" and rank > 1:
                settings += " divisor_override"
            yield getattr(nn, f"{name}{rank}d"), f"{kind}:{rank}", settings
        for name, mode in _PADDING.items():
            value = " value" if mode == "constant" else ""
            yield getattr(nn, f"{name}{rank}d"), f"pad:{mode}", f"pad:padding{value}"
        for space in (nn, gemsc.nn):
            yield getattr(space, f"BatchNorm{rank}d"), "batch_norm", "eps"
        instance_norm = getattr(nn, f"InstanceNorm{rank}d")
        yield instance_norm, "instance_norm", "eps track_running_stats"
    yield nn.FeatureAlphaDropout, "channel_dropout", "p"
    yield nn.Dropout, "dropout", "p"
    yield nn.GroupNorm, "group_norm", "num_groups eps"
    yield nn.LayerNorm, "layer_norm", "normalized_shape eps"
    yield nn.LocalResponseNorm, "channels", "size"
    yield nn.PReLU, "channels", ""
    yield gemsc.nn.FrozenBatchNorm, "channels", ""
    yield nn.ChannelShuffle, "channels", ""
    yield nn.Softmax, "softmax", "dim"
    yield nn.LogSoftmax, "log_softmax", "dim"
    yield nn.GLU, "glu", "dim"
    yield nn.Softmax2d, "channels", ""
    yield nn.RMSNorm, "rms_norm", "normalized_shape eps"
    yield nn.Embedding, "embedding", "padding_idx max_norm scale_grad_by_freq sparse"
    yield nn.Linear, "linear", ""
    yield nn.Upsample, "interpolate", _UPSAMPLE
    yield nn.UpsamplingNearest2d, "interpolate", _UPSAMPLE
    yield nn.UpsamplingBilinear2d, "interpolate", _UPSAMPLE
    yield nn.PixelShuffle, "pixel_shuffle", "upscale_factor"
    yield nn.PixelUnshuffle, "pixel_unshuffle", "downscale_factor"
    yield nn.MSELoss, "loss", "reduction"
    yield nn.L1Loss, "loss", "reduction"
    yield nn.SmoothL1Loss, "loss", "reduction"
    yield nn.HuberLoss, "loss", "reduction"
    yield nn.BCELoss, "loss", "reduction weight"
    yield nn.BCEWithLogitsLoss, "loss", "reduction weight pos_weight"
    yield nn.CrossEntropyLoss, "cross_entropy", "reduction ignore_index label_smoothing"


LAYERS = {cls: (kind, settings) for cls, kind, settings in _layers()}
