"""A model of Keras, on its PyTorch backend, as a plain torch.nn.Module.

Example: the variables
    dense/kernel, batch_normalization/moving_mean
become a parameter and a buffer
    dense.kernel, batch_normalization.moving_mean
and a call computes with these, in this module's mode.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from gemsc.base.nests import detach_hooked
from gemsc.errors import GemscError

_MODES = ("training", "mask")


def is_keras(model: object) -> bool:
    """Return whether this is a layer or model of Keras; it does not load Keras."""
    keras = sys.modules.get("keras")
    return isinstance(model, getattr(keras, "Layer", ()))


def as_module(model: Any) -> Any:
    """Return a model of Keras as a `KerasModel`, anything else as it is.

    Its weights that hooks compute are without a graph: see `detach_hooked`.

    Raises:
        GemscError: it is a loss of Keras, whose arguments have the other order.
    """
    if is_keras(model):
        return KerasModel(model)
    keras, place = sys.modules.get("keras"), getattr(model, "__module__", "")
    if place == "keras.src.losses.losses" or isinstance(
        model, getattr(keras, "Loss", ())
    ):
        raise GemscError(
            "the loss is one of Keras, which takes the target first",
            help="let a function call it: def loss(output, target): return "
            "keras_loss(target, output)",
        )
    if isinstance(model, nn.Module):
        detach_hooked(model)
    return model


class KerasModel(nn.Module):
    """A built model or layer of Keras, which keeps its weights where PyTorch looks.

    Trainable weights are parameters, moving statistics are buffers; they are on the CPU
    and called like Keras' layers and variables, but numbers that Keras gives to layers
    without a name start anew. `train()` and `eval()` set what Keras calls `training`. A
    deep copy has weights of its own, and shares Keras' layers.

    Raises:
        GemscError: it has something that belongs to Keras' own training, such as a
            regularizer, or that cannot be followed.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        _check(model)
        self._keras = _Keras.of(model)
        for path in self._keras.paths.values():
            self._make(path)
        weights = {  # those that are frozen, too
            id(variable)
            for layer in model._flatten_layers()
            for variable in layer._trainable_variables
        }
        for variable, name in self._keras.variables:
            path, _, attribute = name.rpartition(".")
            module, value = self.get_submodule(path), variable.value
            tensor = value.detach().cpu()  # Keras takes a GPU where there is one
            if id(variable) in weights:
                parameter = nn.Parameter(tensor, requires_grad=value.requires_grad)
                module.register_parameter(attribute, parameter)
            else:
                module.register_buffer(attribute, tensor)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the Keras model in this module's mode, with its weights."""
        keras = import_module("keras")

        if torch.compiler.is_compiling():  # its casts would be to one dtype
            raise GemscError(
                "torch.export does not follow Keras models exactly",
                help="use --frontend record, which is the default",
            )
        values = list(self._values())
        scope = keras.StatelessScope(collect_losses=True)
        state = scope.state_mapping
        state.update((id(variable), tensor) for variable, tensor in values)

        def assign(update: tuple[Any, torch.Tensor]) -> None:
            state[id(update[0])] = update[1].detach()  # as outside of such a scope

        scope.add_update = assign
        inputs, named = self._keras.packed(inputs, {"training": self.training} | named)
        with _as_torch(values), self._with_layers(), scope:
            outputs = self._keras.model(*inputs, **named)
        self._keras.check_call(scope)
        for variable, tensor in values:
            new = scope.get_current_value(variable)
            if new is not tensor:
                with torch.no_grad():
                    tensor.copy_(new)
        return outputs

    def give_back(self) -> None:
        """Let the Keras model have the numbers of this module."""
        for variable, tensor in self._values():
            variable.assign(tensor)

    def _values(self) -> Iterator[tuple[Any, torch.Tensor]]:
        tensors = dict([*self.named_parameters(), *self.named_buffers()])
        for variable, name in self._keras.variables:
            yield variable, tensors[name]

    def _make(self, path: str) -> None:
        """Add the module of a layer, unless it is there."""
        owner: nn.Module = self
        for name in filter(None, path.split(".")):
            if name not in owner._modules:
                owner.add_module(name, _Layer())
            owner = owner.get_submodule(name)

    @contextmanager
    def _with_layers(self) -> Iterator[None]:
        """Let each call of a Keras layer be one of the module that has its weights."""
        keras = import_module("keras")

        call = keras.Layer.__call__

        def call_module(layer: Any, *args: Any, **kwargs: Any) -> Any:
            path = self._keras.paths.get(id(layer))
            call_layer = partial(call, layer)
            if not path:
                return call_layer(*args, **kwargs)
            return self.get_submodule(path)(call_layer, *args, **kwargs)

        with patch.object(keras.Layer, "__call__", call_module):
            yield


class _Layer(nn.Module):
    """Has the weights of a Keras layer, and stands for it in traces."""

    def forward(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)


@dataclass(frozen=True)
class _Keras:
    """The Keras model, which copies share, and the names in it.

    `paths` are those of layers, by their `id`; `variables` have all that a program
    keeps: not the state of random generators, of which it has its own.
    """

    model: Any
    paths: Mapping[int, str]
    variables: tuple[tuple[Any, str], ...]

    @classmethod
    def of(cls, model: Any) -> _Keras:
        paths: dict[int, str] = {}
        names: dict[int, tuple[Any, str]] = {}
        _name_layer(model, "", paths, names)
        return cls(model, paths, tuple(names.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Keras:
        return self

    def check_call(self, scope: Any) -> None:
        """Refuse what a call did beside computing outputs and statistics."""
        if scope.losses:
            raise GemscError(
                "the model adds to Keras' loss (add_loss or an activity regularizer), "
                "which gemsc does not see",
                help="return what the term needs as one more output, and add the term "
                "in your loss",
            )
        known = {id(variable) for variable, _ in self.variables}
        known |= {id(v) for v in getattr(self.model, "metrics_variables", ())}
        if not known.issuperset(scope.state_mapping):
            raise GemscError(
                "the model changes a variable that is not one of its weights: the "
                "state of a stateful layer, a seed of its own, or one that no layer "
                "has as an attribute",
                help="set stateful=False, give keras.random's functions the "
                "SeedGenerator itself, and keep variables with self.add_weight(...)",
            )
        if len(self.model.variables) != len(self.variables) + len(_seeds(self.model)):
            raise GemscError(
                "the model has weights that it did not have before this call",
                help="call the model once on inputs before you return it",
            )

    def packed(
        self, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs as Keras takes them: those of a graph in one argument."""
        keras = import_module("keras")

        if not hasattr(self.model, "_inputs_struct"):
            return inputs, named
        by_name = {key: named.pop(key) for key in list(named) if key not in _MODES}
        if by_name:
            inputs = (by_name,)
        elif len(inputs) > 1:
            inputs = (keras.tree.pack_sequence_as(self.model._inputs_struct, inputs),)
        return inputs, named


def _name_layer(
    layer: Any, path: str, paths: dict[int, str], names: dict[int, tuple[Any, str]]
) -> None:
    """Name a layer, its variables and all layers in it, each once."""
    paths[id(layer)] = path
    taken: set[str] = set()
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        if id(variable) not in names:
            unique = _free(variable.name, taken)
            names[id(variable)] = variable, f"{path}.{unique}".lstrip(".")
    for child in layer._flatten_layers(include_self=False, recursive=False):
        if id(child) not in paths and type(child).__name__ != "InputLayer":
            unique = _free(_without_number(child), taken)
            _name_layer(child, f"{path}.{unique}".lstrip("."), paths, names)


def _without_number(layer: Any) -> str:
    """Return the layer's name, without the number that Keras gave it."""
    to_snake_case = import_module("keras.src.utils.naming").to_snake_case

    name, kind = str(layer.name), str(to_snake_case(type(layer).__name__))
    return kind if re.fullmatch(rf"{re.escape(kind)}_\d+", name) else name


def _free(name: str, taken: set[str]) -> str:
    """Return a name for an attribute of a module that no other has."""
    name = re.sub(r"\W", "_", name)
    if hasattr(_Layer(), name):
        name += "_"
    number, first = 1, name
    while name in taken:
        name, number = f"{first}_{number}", number + 1
    taken.add(name)
    return name


def _seeds(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    return [seed.state for layer in layers for seed in layer._seed_generators]


def _check(model: Any) -> None:
    """Refuse what can be told before a call."""
    is_module = isinstance(model, nn.Module)
    if not is_module:
        raise GemscError(
            "the Keras model uses another backend than PyTorch",
            help='set os.environ["KERAS_BACKEND"] = "torch" before importing keras',
        )
    for layer in model._flatten_layers():
        if problem := _problem(layer):
            what, help_text = problem
            raise GemscError(f"the model's layer '{layer.name}' {what}", help=help_text)


def _problem(layer: Any) -> tuple[str, str] | None:
    if not layer.built:
        return "is not built: it has no weights yet", (
            "call the model once on inputs before you return it"
        )
    if getattr(layer, "_remat_mode", None) is not None:
        return "computes its activations again (RematScope)", (
            "leave that out: gemsc compile --recompute does it"
        )
    if layer.dtype_policy.name == "mixed_float16":
        return "has the policy mixed_float16, for which Keras scales the loss", (
            "leave the policy out: gemsc compile --precision float16 scales it, too"
        )
    is_wrapper = isinstance(layer, sys.modules["keras"].layers.TorchModuleWrapper)
    if layer._parameters or layer._buffers or is_wrapper:
        return "holds weights of PyTorch", (
            "keep Keras' own, self.add_weight(...); or write the model as a "
            "torch.nn.Module, with gemsc.KerasModel(part) for what is of Keras"
        )
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        if getattr(variable, "regularizer", None) is not None:
            return f"has a regularizer of '{variable.name}', a part of Keras' loss", (
                "leave it out; an L2 regularizer is weight_decay in your optimizer"
            )
        if getattr(variable, "constraint", None) is not None:
            return f"has a constraint on '{variable.name}', a part of fit()", (
                "leave it out, or apply it in call()"
            )
    return None


@contextmanager
def _as_torch(values: list[tuple[Any, torch.Tensor]]) -> Iterator[None]:
    """Let Keras compute where these values of its variables are, and in their dtype.

    It draws from PyTorch's own random generator, as programs do.
    """
    global_state = import_module("keras.src.backend.common.global_state")
    core = import_module("keras.src.backend.torch.core")
    random = import_module("keras.src.backend.torch.random")

    dtypes = {v.dtype: x.dtype for v, x in values if x.is_floating_point()}
    device = values[0][1].device if values else torch.device("cpu")
    keras_dtypes = dict(core.TORCH_DTYPES)
    settings = {"torch_device": device, "traceback_filtering": False}
    before = {name: global_state.get_global_attribute(name) for name in settings}
    core.TORCH_DTYPES.update(dtypes)
    for name, value in settings.items():
        global_state.set_global_attribute(name, value)
    try:
        with patch.object(random, "torch_seed_generator", _no_generator):
            yield
    finally:
        core.TORCH_DTYPES.update(keras_dtypes)
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def _no_generator(seed: object) -> None:
    if isinstance(seed, int):
        raise GemscError(
            f"the model draws random numbers with the fixed seed {seed}: always the "
            "same ones",
            help="give it a keras.random.SeedGenerator, kept by the layer, or none",
        )
