"""Layers of the user's own: a file with a function for each gives them as modules.

Example, of layers.py for a layer of class `Scale` with one variable:
    def Scale(config):
        return ScaleLayer(config["units"])  # a torch.nn.Module
gives in model.py
    self.scale = layers.Scale({"units": 8})
The module gets tensors with their axes as Keras has them. Those that its state_dict
holds are in order the variables of Keras' layer: its own, then those of its parts.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.importers.keras.layer import Laid, LayerCall, Translator
from gemsc.importers.weight import Weight, same

# settings that say how to make or train weights, or what gemsc never runs
_LEFT_OUT = re.compile(
    r"function|arguments|dtype|name|trainable|.*_(initializer|regularizer|constraint)"
)


def custom_name(name: str) -> str:
    """Return what a function for a layer of this name, or of this class, is called."""
    return re.sub(r"\W", "_", name.split(">")[-1], flags=re.ASCII)


def custom_layers(path: Path | None) -> Mapping[str, Translator]:
    """Return a translator for each function of the user's file, by its name.

    Raises:
        GemscError: the file cannot be imported.
    """
    if path is None:
        return {}
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GemscError(
            f"--custom {path}: importing it fails: {type(error).__name__}: {error}",
            help=_import_advice(path, error),
        ) from error
    finally:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
    return {
        name: partial(_translate, path, name, value)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == path.stem
    }


def _import_advice(path: Path, error: Exception) -> str:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and path.with_name(f"{name}.py").is_file():
        return f"put what it needs of {name}.py into {path.name}: it alone is copied"
    return f"`python {path}` shows the whole traceback"


def _translate(
    path: Path, name: str, function: Callable[..., Any], call: LayerCall
) -> Laid | list[Laid]:
    if "" not in call.layer.added:
        call.layer.added[""] = _add(call, path, name, function)
    return _called(call, call.layer.added[""], f"{name}() of {path.name}")


def _add(call: LayerCall, path: Path, name: str, function: Callable[..., Any]) -> str:
    settings = {k: v for k, v in call.config.items() if not _LEFT_OUT.fullmatch(k)}
    where = f"{name}() of {path.name}"
    try:
        with torch.device("meta"):
            module = function(settings)
    except Exception as error:
        raise call.refuse(
            f"cannot be made: {where} fails: {type(error).__name__}: {error}",
            help=f"it is given {settings!r:.200}",
        ) from error
    if not isinstance(module, nn.Module):
        raise call.refuse(
            f"cannot be made: {where} returns an object of type "
            f"{type(module).__name__}",
            help="return a torch.nn.Module",
        )
    weights = _weights(call, module, where)
    frozen = list(weights) if call.layer.frozen else []
    text = f"{path.stem}.{name}({settings!r})"
    return call.sheet.layer(call.layer.name, module, weights, frozen=frozen, text=text)


def _weights(call: LayerCall, module: nn.Module, where: str) -> dict[str, Weight]:
    """Return the variables of the layer under the names of the module's tensors.

    The file has the parts of a layer in alphabetical order: where these have variables
    of the same shape, the module must have parts of the same names.
    """
    parts = {
        part.replace("/", "."): names
        for part, names in call.layer.variables.items()
        if names and not part.endswith("seed_generator")
    }
    tensors = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    owners = {name: name.rpartition(".")[0] for name in tensors}
    is_named = Counter(owners.values()) == {p: len(n) for p, n in parts.items()}
    taken = {part: iter(names) for part, names in parts.items()}
    order = owners.values() if is_named else [p for p in parts for _ in parts[p]]
    sources = [next(taken[part]) for part in order]
    sizes = [tuple(call.layer.table[source].shape) for source in sources]
    if list(tensors.values()) != sizes:
        ours, file = _said(tensors.items()), _said(zip(sources, sizes, strict=True))
        raise call.refuse(
            f"has other weights than {where}: {file} in the file, {ours} in the module",
            help="give the module parameters of the shapes that Keras' variables have, "
            "in their order; transpose them in forward",
        )
    if not is_named and len(set(zip(order, sizes, strict=True))) > len(set(sizes)):
        raise call.refuse(
            "has parts with variables of one shape, and the file does not say in which "
            f"order: {', '.join(filter(None, parts)):.200}",
            help=f"let the module of {where} have parts of these names, such as "
            "self.key = nn.ParameterDict({'kernel': torch.empty(4, 4)})",
        )
    return dict(zip(tensors, map(same, sources), strict=True))


def _said(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    texts = [f"{name} {'x'.join(map(str, shape)) or '()'}" for name, shape in shapes]
    return ", ".join(texts) or "none"


# ------------------------------------------------------------------------ the call


def _called(call: LayerCall, layer: str, where: str) -> Laid | list[Laid]:
    arguments = [_text(call, argument) for argument in call.arguments]
    for key, value in call.keywords.items():
        if not key.isidentifier():
            raise call.refuse(f"is called with {key!r:.60}, which is not a name")
        arguments.append(f"{key}={_text(call, value)}")
    text = f"{layer}({', '.join(arguments)})"
    try:
        returned = call.sheet.empty(text)
    except GemscError as error:
        error.help = f"the module is made by {where}"
        raise
    except Exception as error:
        raise call.refuse(
            f"cannot be computed: {text} fails: {type(error).__name__}: {error}",
            help=f"the module is made by {where}",
        ) from error
    if isinstance(returned, Tensor):
        return call.gives(text)
    several = returned if isinstance(returned, tuple | list) else [returned]
    for value in several:
        if not isinstance(value, Tensor):
            raise call.refuse(
                f"gives an object of type {type(value).__name__}",
                help=f"let the module of {where} return tensors",
            )
    return call.several(text, len(returned))


def _text(call: LayerCall, value: Any) -> str:
    """Return an argument: a tensor with its axes as Keras has them, or a constant."""
    if isinstance(value, Laid):
        return str(call.last(value))
    if isinstance(value, list):
        return f"[{', '.join(_text(call, part) for part in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_text(call, part) for part in value)},)"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise call.refuse(f"is given an argument of type {type(value).__name__}")
