"""What one ATen operator has to do: its kind, and the quantities that take time.

The same description is used when a machine is calibrated and when a model is
predicted, forward and backward, so that the two cannot disagree. A device's fitted
function of these quantities gives the seconds, or else a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from gemsc.base.dtypes import format_of
from gemsc.costs.hardware import Device
from gemsc.ir.operators.work import Work

_ATEN = torch.ops.aten
_FREE = frozenset(
    {_ATEN._unsafe_view, _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided}
)
CACHE_BYTES = 2**20  # an operator with less to move finds it in a core's own cache
ALIAS_BYTES = 2**11  # addresses so far apart use the same lines of a core's own cache
LANES = 16  # numbers in float32 that a core or a warp works on at once
FRESH_BYTES = 2**25  # allocations of so much come from the system, page by page
_Extra = Callable[[list[Tensor], list[Tensor], Any], dict[str, float]]
MULTIPLIES = frozenset({"convolution", "matmul", "attention"})
# what stays what it is where a rank has a part of the values
STAYING = frozenset({"convolution", "matmul", "norm", "softmax", "pool", "pointwise"})


def runs_a_kernel(func: Any, result: Any) -> bool:
    """Whether an operator computes: views, allocations and queries do not."""
    has_tensors = any(isinstance(t, Tensor) for t in pytree.tree_leaves(result))
    return has_tensors and not func.is_view and func._overloadpacket not in _FREE


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def family(kind: str) -> str:
    """Return the first word of a kind: `convolution` for `convolution-2d-input`."""
    return kind.split("-", 1)[0]


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, list[Work]]:
    """Return the operations of an ATen operator, and the kernels that it runs.

    Those of sparse tensors take no time, as far as is known.
    """
    if any(
        isinstance(leaf, Tensor) and leaf.layout is not torch.strided
        for leaf in pytree.tree_leaves((args, kwargs, result))
    ):
        return 0, []
    name = func._schema.name.removeprefix("aten::")
    formula = flop_registry.get(func._overloadpacket)
    if name.startswith("_scaled_dot_product_"):
        flops = _attention_flops(name, args)
    else:
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    if name == "convolution":
        return flops, [_convolution(args, given, results)]
    if name == "convolution_backward":
        return flops, _convolution_backward(args)
    kind, extra = _KINDS.get(name, ("other", _nothing))
    kind += _form(kind, given, results)
    features = {**_moved(given, results), "flops": float(flops)}
    if name.endswith("_"):  # in place
        features["fresh"] = 0.0
    features |= extra(given, results, args)
    return flops, [Work(kind, _dtype(results), features)]


def _attention_flops(name: str, args: Sequence[Any]) -> int:
    """Return those of the products of matrices, which PyTorch knows for CUDA only.

    Backward makes the scores again. Heads may share keys and values.
    """
    is_backward = name.endswith("_backward")
    query, key, value = args[1:4] if is_backward else args[:3]
    of_keys, of_values = (3, 2) if is_backward else (1, 1)
    scores = query.shape[:-1].numel() * key.shape[-2]
    return int(2 * scores * (of_keys * query.shape[-1] + of_values * value.shape[-1]))


def _form(kind: str, given: list[Tensor], results: list[Tensor]) -> str:
    """Return how tensors lie, for kinds that it matters to.

    Matrices: rows first (n) or transposed (t). Sums: of whole rows or of columns.
    """
    if kind == "matmul":
        if results[0].dim() > 2:
            return "-batched"
        return "-" + "".join("n" if _has_rows(t) else "t" for t in given[-2:])
    if kind == "pointwise-sum" and given[0].dim() and results[0].dim():
        return "-columns" if results[0].shape[-1] == given[0].shape[-1] else ""
    return ""


def _dtype(results: list[Tensor]) -> str:
    return str(results[0].dtype).removeprefix("torch.")


def _moved(given: list[Tensor], results: list[Tensor]) -> dict[str, float]:
    """Return the features that all kinds have."""
    read = sum(t.nbytes for t in given)
    written = sum(t.nbytes for t in results)
    return {
        "calls": 1.0,
        "read": float(read),
        "written": float(written),
        "far": float(max(0, read + written - CACHE_BYTES)),
        "fresh": float(sum(t.nbytes for t in results if t.nbytes >= FRESH_BYTES)),
        "strided": float(sum(t.nbytes for t in given if not _has_rows(t))),
    }


def _has_rows(tensor: Tensor) -> bool:
    if tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1:
        return True
    return format_of(tensor) is not torch.contiguous_format  # rows of channels


# Convolutions. What is written for forward holds for the two gradients as well: each of
# them multiplies as much, and reads and writes the same three tensors in other roles.


def _convolution(args: Any, given: list[Tensor], results: list[Tensor]) -> Work:
    x, weight, bias, *shape = args
    features = _moved(given, results) | _filters(x, weight, results[0], shape)
    kind = _variant(x, weight, bias, shape)
    return Work(f"convolution-{kind}", _dtype(results), features)


def _convolution_backward(args: Any) -> list[Work]:
    """Return one kernel for each gradient that is asked for.

    That of the bias is a by-product of that of the weight.
    """
    gradient, x, weight, _, *shape, wanted = args
    filters = _filters(x, weight, gradient, shape)
    kind = _variant(x, weight, None, shape)
    works = []
    for is_wanted, name, read, written in (
        (wanted[0], "input", [gradient, weight], x),
        (wanted[1], "weight", [gradient, x], weight),
    ):
        if is_wanted:
            features = _moved(read, [written]) | filters
            name = f"convolution-{kind}-{name}"
            works.append(Work(name, _dtype([gradient]), features))
    return works


def _variant(x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[Any]) -> str:
    """Return the kind of a convolution, by its form and by who computes it.

    PyTorch computes some on a CPU by itself, as a product of matrices with the input
    unfolded: small ones of one image, 1 x 1 with one thread, transposed, float64.
    """
    *_, transposed, _, groups = shape
    backend = torch._C._select_conv_backend(x, weight, bias, *shape)
    unfolded = "-unfolded" if backend.name.startswith("Slow") else ""
    if transposed:
        return f"transposed{unfolded}"
    if groups > 1 and groups == x.shape[1]:
        return f"depthwise{unfolded}"
    if math.prod(weight.shape[2:]) == 1:
        return f"1x1{unfolded}"
    return f"{'3d' if x.dim() == 5 else '2d'}{unfolded}"


def _filters(
    x: Tensor, weight: Tensor, y: Tensor, shape: list[Any]
) -> dict[str, float]:
    """Return the features of a convolution.

    flops: 2 x batch x positions x kernel x channels in x channels out / groups,
        positions being those of the output (of the input if transposed)
    flops_per_in, flops_per_out: the same, divided by the channels in and out of one
        group: few channels leave vector lanes empty
    flops_per_row: divided by the positions of one row, which is worked on at a time
    flops_thin: only if an image has few positions, 2 to 15: vectors stay half empty
    flops_strided: only if the stride is not 1: inputs are gathered
    flops_padded: with channels rounded up to whole vectors of 16
    flops_ragged_in, flops_ragged_out: only if the channels are no multiple of 16
    unfolded, unfolded_fresh: bytes of the input with each position's neighbourhood
        written out; only if that memory is new each time
    weights: bytes of the weight, which is packed anew at each call
    weights_each: the same for each image of the batch
    weights_far: what of these a core's own cache cannot keep from one to the next
    weights_thin, weights_far_thin: both only if an image has few positions, as above:
        then one pass over the weights takes as long for 2 positions as for 9
    weights_aliased, weights_aliased_thin: weights_each, only if rows of the weight are
        multiples of 2 KiB: their beginnings compete for the same lines of a cache
    """
    stride, _, _, transposed, _, groups = shape
    narrow, wide = (x, y) if transposed else (y, x)
    kernel = math.prod(weight.shape[2:])
    channels_in = wide.shape[1] // groups
    channels_out = narrow.shape[1] // groups
    in_image = math.prod(narrow.shape[2:])
    positions = narrow.shape[0] * in_image
    flops = 2.0 * positions * kernel * channels_in * channels_out * groups
    rounded = _rounded(channels_in) * _rounded(channels_out)
    is_strided = any(step != 1 for step in stride)
    thin = 1.0 if 1 < in_image < LANES else 0.0
    repeated = float(weight.nbytes * x.shape[0])
    far = float(max(0, weight.nbytes - CACHE_BYTES) * x.shape[0])
    row = math.prod(weight.shape[1:]) * weight.element_size()
    aliased = 0.0 if row % ALIAS_BYTES else 1.0
    unfolded = float(positions * kernel * wide.shape[1] * x.element_size())
    return {
        "flops": flops,
        "flops_per_in": flops / channels_in,
        "flops_per_out": flops / channels_out,
        "flops_per_row": flops / narrow.shape[-1],
        "flops_thin": flops * thin,
        "flops_strided": flops if is_strided else 0.0,
        "flops_padded": flops * rounded / (channels_in * channels_out),
        "flops_ragged_in": flops if channels_in % LANES else 0.0,
        "flops_ragged_out": flops if channels_out % LANES else 0.0,
        "unfolded": unfolded,
        "unfolded_fresh": unfolded if unfolded >= FRESH_BYTES else 0.0,
        "weights": float(weight.nbytes),
        "weights_each": repeated,
        "weights_far": far,
        "weights_thin": repeated * thin,
        "weights_far_thin": far * thin,
        "weights_aliased": repeated * aliased,
        "weights_aliased_thin": repeated * aliased * thin,
    }


def _rounded(channels: int) -> int:
    return LANES * math.ceil(channels / LANES)


# The other kinds. Each function returns what its kind adds to the features of all.


def _nothing(given: list[Tensor], results: list[Tensor], args: Any) -> dict[str, float]:
    return {}


def _product(given: list[Tensor], results: list[Tensor], args: Any) -> dict[str, float]:
    """Matrices: `flops_per_row` and the like say how long and thin they are."""
    a, b = given[-2:]
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = math.prod(a.shape[:-2])
    flops = 2.0 * batch * rows * inner * columns
    return {
        "flops": flops,  # none where a matrix is empty
        "flops_per_row": flops / max(1, rows),
        "flops_per_inner": flops / max(1, inner),
        "flops_per_column": flops / max(1, columns),
        "matrices": float(batch),
    }


def _scores(given: list[Tensor], results: list[Tensor], args: Any) -> dict[str, float]:
    """Attention: one score for each head and pair of positions, an exponential each."""
    query, key = given[0], given[1]
    return {"scores": float(math.prod(query.shape[:-1]) * key.shape[-2])}


def _rows(given: list[Tensor], results: list[Tensor], args: Any) -> dict[str, float]:
    """Softmax and layer norm go row by row."""
    largest = max(given, key=lambda t: t.numel())
    return {"rows": largest.numel() / max(1, largest.shape[-1] if largest.dim() else 1)}


def _planes(given: list[Tensor], results: list[Tensor], args: Any) -> dict[str, float]:
    """Batch and group norm go plane by plane: one for each sample and channel."""
    largest = max(given, key=lambda t: t.numel())
    return {"planes": float(math.prod(largest.shape[:2]))}


def _windows(given: list[Tensor], results: list[Tensor], args: Any) -> dict[str, float]:
    """Pooling: values looked at, one for each output and position of its window."""
    sizes = next((a for a in args if isinstance(a, (list, tuple))), [1])
    window = math.prod(sizes)
    tensors = [t for t in (*given, *results) if t.is_floating_point()]
    outputs = min(t.numel() for t in tensors)
    return {"looked_at": float(outputs * window), "outputs": float(outputs)}


def _positions(
    given: list[Tensor], results: list[Tensor], args: Any
) -> dict[str, float]:
    """Interpolation and tables: outputs are gathered one by one."""
    tensors = [t for t in (*given, *results) if t.is_floating_point()]
    return {"outputs": float(max(t.numel() for t in tensors))}


# kind: what it adds to the features of all, and the operators that are of it
_OPERATORS: dict[str, tuple[_Extra, str]] = {
    "matmul": (_product, "mm addmm bmm baddbmm"),
    "attention": (_scores, "_scaled_dot_product_flash_attention_for_cpu"),
    "attention-backward": (
        _scores,
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "norm-batch": (
        _planes,
        "native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
        "_native_batch_norm_legit_no_training",
    ),
    "norm-batch-backward": (
        _planes,
        "native_batch_norm_backward cudnn_batch_norm_backward",
    ),
    "norm-group": (_planes, "native_group_norm"),
    "norm-group-backward": (_planes, "native_group_norm_backward"),
    "norm-layer": (_rows, "native_layer_norm"),
    "norm-layer-backward": (_rows, "native_layer_norm_backward"),
    "softmax": (_rows, "_softmax _log_softmax"),
    "softmax-backward": (_rows, "_softmax_backward_data _log_softmax_backward_data"),
    "pool-max": (_windows, "max_pool2d_with_indices max_pool3d_with_indices"),
    "pool-max-backward": (
        _windows,
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    ),
    "pool-average": (_windows, "avg_pool2d avg_pool3d _adaptive_avg_pool2d"),
    "pool-average-backward": (
        _windows,
        "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward",
    ),
    "interpolate-nearest": (_positions, "upsample_nearest2d upsample_nearest3d"),
    "interpolate-nearest-backward": (
        _positions,
        "upsample_nearest2d_backward upsample_nearest3d_backward",
    ),
    "interpolate-linear": (_positions, "upsample_bilinear2d upsample_trilinear3d"),
    "interpolate-linear-backward": (
        _positions,
        "upsample_bilinear2d_backward upsample_trilinear3d_backward",
    ),
    "embedding": (_nothing, "embedding"),
    "embedding-backward": (_positions, "embedding_dense_backward"),
    "copy": (_nothing, "cat clone copy_ _to_copy constant_pad_nd slice_backward"),
    "pointwise-sum": (_nothing, "sum mean amax var_mean"),
    "pointwise-gelu": (_nothing, "gelu"),
    "pointwise-gelu-backward": (_nothing, "gelu_backward"),
    "pointwise-exp": (
        _nothing,
        "exp log sigmoid tanh silu softplus sin cos pow silu_backward "
        "softplus_backward log_sigmoid_backward",
    ),
    "pointwise-random": (_nothing, "bernoulli native_dropout bernoulli_ rand_like"),
    "pointwise": (
        _nothing,
        "add sub mul div neg relu threshold_backward where add_ mul_ div_ hardtanh "
        "hardtanh_backward leaky_relu leaky_relu_backward native_dropout_backward "
        "masked_fill rsub sigmoid_backward tanh_backward clamp maximum minimum "
        "zeros_like ones_like fill_ zero_ full zeros abs",
    ),
}
_KINDS = {
    name: (kind, extra)
    for kind, (extra, names) in _OPERATORS.items()
    for name in names.split()
}


def seconds(device: Device, work: Work) -> float:
    """Return the predicted time of one kernel, without the device's overheads.

    Where the device has a `fit` for the kind: the sum of its coefficients times the
    features, those of operations scaled by the peaks of the dtypes.
    """
    fitted = device.fit.get(work.kind) or device.fit.get(family(work.kind))
    fitted = fitted or device.fit.get(work.kind.replace("-unfolded", ""))
    if fitted is None:
        return roofline(device, work)
    slower = _peak(device, "float32") / _peak(device, work.dtype)
    return sum(
        per_unit * work.features.get(name, 0.0) * (slower if "flops" in name else 1.0)
        for name, per_unit in fitted.items()
    )


def least_seconds(device: Device, kind: str) -> float:
    """Return what a kernel takes at least, however small its part of the values is.

    It is 0 for kinds that may be others then, or none, and where nothing was fitted.
    """
    if family(kind) not in STAYING or "-depthwise" in kind:
        return 0.0

    def alike(kind: str) -> str:  # rows and columns, and who computes it, may change
        if family(kind) == "matmul":
            return "matmul"
        return kind.replace("-unfolded", "").replace("-columns", "")

    forms = (fit for name, fit in device.fit.items() if alike(name) == alike(kind))
    return min((fit.get("calls", 0.0) for fit in forms), default=0.0)


def roofline(device: Device, work: Work) -> float:
    """Return the longer of computing and moving (Williams et al. 2009).

    computing = (flops (1 + h/in + h/out) + half_flops) / (peak x efficiency)
    moving = bytes / (bandwidth x efficiency)

    with h = half_channels: half the efficiency at h channels, all of it at many; and
    half of it at half_flops operations.
    """
    kind = family(work.kind)
    features = work.features
    share = device.efficiency.get(kind, device.efficiency.get("other", 1.0))
    moved = features["read"] + features["written"]
    if kind not in MULTIPLIES or not features["flops"]:
        return moved / (device.memory_bandwidth * share)
    thin = features.get("flops_per_in", 0.0) + features.get("flops_per_out", 0.0)
    flops = features["flops"] + device.half_channels * thin + device.half_flops
    dtype = work.dtype
    if kind == "convolution" and dtype == "float32" and "tf32" in device.peak_flops:
        dtype = "tf32"
    copying = device.efficiency.get("copy", 1.0)
    return max(
        flops / (_peak(device, dtype) * share),
        moved / (device.memory_bandwidth * copying),
    )


def _peak(device: Device, dtype: str) -> float:
    """Return the peak of a dtype; of float32 if the file does not know it."""
    peaks = device.peak_flops
    return peaks.get(dtype) or peaks.get("float32") or max(peaks.values())
