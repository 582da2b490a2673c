"""Watch a model run on fake tensors and record what it does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from gemsc.base.nests import call_model, tensor_leaves
from gemsc.base.plain_forward import (
    own_checkpoint,
    patched,
    plain_forward,
    plain_scripts,
)
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.attention import attention_of
from gemsc.frontend.eager import snapshot
from gemsc.frontend.fake_copy import FakeCopy, in_one_memory
from gemsc.frontend.opaque import (
    DATA_ERRORS,
    DependsOnDataError,
    TransformsError,
    data_error,
    of_a_loss,
    user_error,
)
from gemsc.frontend.runs import fixed_numbers
from gemsc.frontend.targets import (
    TargetCall,
    check_autocast,
    describe_call,
    is_ignored,
)
from gemsc.frontend.user_code import UserLine, guarded, user_line
from gemsc.frontend.writer import GraphWriter
from gemsc.ir import meta
from gemsc.ir.fake import without_count
from gemsc.ir.layers import HOOKS
from gemsc.ir.mutation import call_mutates
from gemsc.ir.opaque import Opaque, stand_in
from gemsc.runtime.tiles import must_be

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NUMBERS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__),
    *(torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
}
_LONGEST = 56  # letters of the user's line in an argument


class TracerFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that also report what bypasses torch functions.

    Scripted functions and some constructors reach the dispatcher without passing
    `__torch_function__`; `tracer` then records the ATen operators themselves.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tracer: Tracer | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute on fakes; record if no recorded function is under way."""
        if self.tracer is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        given = tensor_leaves((args, kwargs))
        numbers = [tensor for _, tensor in given if hasattr(tensor, "of_buffer")]
        asks = not _ASKS.isdisjoint(func.tags)
        for number in numbers:
            if asks:
                self.tracer.note_number(number, func)
            elif func._schema.is_mutable and number.constant is not None:
                # it differs from step to step: the second trace must not know it
                self.fake_tensor_converter.invalidate_constant_aliases(number.constant)
        record = not self.tracer.paused
        with self.tracer.pause(), _unknown(numbers if asks else []):
            compute = super().__torch_dispatch__
            result = in_one_memory(self, compute, func, types, args, kwargs or {})
        for _, tensor in tensor_leaves(result) if numbers else ():
            vars(tensor)["of_buffer"] = True
        if record:
            self.tracer.record_dispatch(func, args, kwargs or {}, result)
        return result


class Tracer(TorchFunctionMode):
    """Records into `writer` all that a function does while `run` runs it.

    `called` are the leaf layers in the order of their calls, and whether they were in
    training mode; `checkpoints` are the lines of activation checkpoints. The modules at
    the paths of `opaque` are leaves that are not run.
    """

    def __init__(
        self,
        copied: FakeCopy,
        fake: TracerFakeMode,
        writer: GraphWriter,
        opaque: Mapping[str, Opaque],
    ) -> None:
        super().__init__()
        self.writer = writer
        self._opaque = opaque
        self.called: list[tuple[str, nn.Module, bool]] = []
        self.checkpoints: list[SourceLocation] = []
        self.paused = False
        self._copied = copied
        self._fake = fake
        self._error: GemscError | None = None
        self._noted: dict[int, torch.Tensor] = {}
        self._read: dict[int, float] = {}  # what a call asked for
        self._unseen: list[tuple[Any, SourceLocation | None]] = []

    def run(
        self,
        what: str,
        function: Callable[..., Any],
        args: Any,
        then: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Call `function`, then `then` on what it returns; record all that they do.

        Raises:
            GemscError: at the user's line, whatever went wrong there.
        """
        boundary = Tracer.run.__code__
        self._fake.tracer = self
        try:
            plain = plain_forward(self._note_checkpoint)
            with _patched(self), plain, torch.enable_grad(), self._fake, self:
                result = then(call_model(function, args))
            self._check_unseen()
        except GemscError as error:
            problem = self._error or error
            raise of_a_loss(problem, function, error, boundary) from error.__cause__
        except (Exception, SystemExit) as error:
            problem = user_error(what, error, boundary)
            raise of_a_loss(problem, function, error, boundary) from error
        finally:
            self._fake.tracer = None
        if self._error is not None:  # the user's code caught it and went on
            raise self._error
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing: what happens belongs to a node that is recorded already."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __torch_function__(
        self, func: Any, types: Any, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> Any:
        """Run a torch function; record it if tensors come out of it."""
        kwargs = kwargs or {}
        if self.paused or is_ignored(func):
            return func(*args, **kwargs)
        for kind in types:
            if not issubclass(kind, torch.Tensor):  # holds one, as Keras' variables do
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if func in _NUMBERS:
            known = fixed_numbers(self.writer, args[0])
            if known is not None:
                with unset_fake_temporarily():
                    return func(known)
        if func is torch.Tensor.__bool__:
            asked = self._asked(args[0], sys._getframe(1))
            if asked is not None:
                return asked
        attention = attention_of(func, args, kwargs)
        if attention is not None:
            with self:
                return attention()
        with self._at_user_line() as line:
            call = describe_call(
                func, args, kwargs, written_as_operator=bool(line and line.operator)
            )
            return self._record(call, func, args, kwargs)

    def _asked(self, test: torch.Tensor, frame: FrameType) -> bool | None:
        """Return what a test is, for a guard if it finds nothing; None: not known.

        A guard is asked again as the program runs.
        """
        with self.pause(), suppress(DataDependentOutputException):
            return bool(test)
        value = guarded(frame)
        if value is None:
            return None
        self._must_be(value, test)
        return value

    def note_number(self, number: torch.Tensor, func: Any) -> None:
        """Let the program check a number of a buffer that forward asks for."""
        known: torch.Tensor | None = number.constant  # type: ignore[attr-defined]
        if known is None or known.numel() > 1:
            return
        if not self.writer.finds(number):  # made within a function of torch
            raise DataDependentOutputException(func)
        value = known.item()
        if func is torch.ops.aten._local_scalar_dense.default:
            self._read[id(number)] = value
        if id(number) not in self._noted:
            self._noted[id(number)] = number
            self._must_be(value, number)

    def _must_be(self, value: float, test: torch.Tensor) -> None:
        before = self.writer.line
        with self._at_user_line() as line:
            self.writer.line = replace(line, target=None) if line else None
            at = line.location if line else None
            text = f"{at.short}: {at.text}" if at else "a test of the data"
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
            given = value, test, text
            self._record(("call_function", must_be, given, {}), must_be, given, {})
        self.writer.line = before

    def call_module(
        self, original: Any, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Run a module: a leaf becomes one node, others are looked into."""
        is_hooked = any(vars(module).get(name) for name in HOOKS)  # perhaps since then
        leaf = None if is_hooked else self._copied.leaves.get(id(module))
        path = leaf if leaf in self._opaque else self._copied.modules.get(id(module))
        if self.paused or (leaf is None and path is None):
            return original(module, *args, **kwargs)
        if leaf is not None and path is None and self._copied.holds_its_own(module):
            self.called.append((leaf, module, module.training))
            call = ("call_module", leaf, args, kwargs)
            with self._at_user_line(leaf), without_count(module):
                return self._record(call, original, (module, *args), kwargs)
        if path is not None and path in self._opaque:
            return self._call_opaque(path, module, args, kwargs)
        outer, self.writer.module_path = self.writer.module_path, path or ""
        try:
            return original(module, *args, **kwargs)
        except Exception as error:
            vars(error).setdefault("gemsc_path", path)  # of the innermost module
            raise
        finally:
            self.writer.module_path = outer

    def _call_opaque(
        self, path: str, module: nn.Module, args: _Args, kwargs: _Kwargs
    ) -> Any:
        """Record a module that depends on data: one node with known shapes."""
        if not self._copied.holds_its_own(module):
            line = user_line(Tracer.run.__code__)
            raise DependsOnDataError(
                f"'{path}' stays whole on one rank, but is called here with parameters "
                "or buffers other than its own",
                path=self.writer.module_path,
                at=line.location if line else None,
                help="move it and this call into a submodule, which then stays whole",
            )
        self.called.append((path, module, module.training))
        parameters = list(module.parameters())

        def give(*args: Any, **kwargs: Any) -> Any:
            return stand_in(self._opaque[path], parameters, args, kwargs)

        with self._at_user_line():
            return self._record(("call_module", path, args, kwargs), give, args, kwargs)

    def call_autograd_function(self, apply: Any, args: _Args, kwargs: _Kwargs) -> Any:
        """Run a custom autograd function: one node that keeps the user's backward."""
        if self.paused:
            return apply(*args, **kwargs)
        if (checkpointed := own_checkpoint(apply.__self__, args)) is not None:
            self._note_checkpoint()
            return checkpointed()
        call = ("call_function", apply, args, kwargs)
        given = [(p[1], t, t._version) for p, t in tensor_leaves((args, kwargs))]
        with self._at_user_line():
            result = self._record(call, apply, args, kwargs, (args, kwargs))
            changed = [place for place, t, version in given if t._version != version]
            if changed and not any(True for _ in tensor_leaves(result)):
                self.writer.call(call, None)
        if changed:
            node = next(iter(reversed(self.writer.graph.nodes)))
            meta.writes.set(node, tuple(dict.fromkeys(changed)))
        return result

    def note_context(self, context: Any) -> None:
        """Keep what a custom autograd function saves in, if the call was not seen."""
        if not self.paused:
            line = user_line(Tracer.run.__code__)
            self._unseen.append((context, line.location if line else None))

    def _check_unseen(self) -> None:
        for context, at in self._unseen:
            if any(context.needs_input_grad):
                name = context._forward_cls.__name__
                raise GemscError(
                    f"{name}.apply was taken from its class before forward ran: the "
                    "trace cannot see this call, and its backward would be lost",
                    at=at,
                    help=f"write {name}.apply(...) where it is called",
                )

    def _note_checkpoint(self) -> None:
        line = user_line(Tracer.run.__code__)
        if line is not None:
            self.checkpoints.append(line.location)

    def record_dispatch(
        self, func: Any, args: _Args, kwargs: _Kwargs, result: Any
    ) -> None:
        """Record an ATen operator that no torch function announced."""
        with self._at_user_line(), self.pause():
            if func is torch.ops.aten.lift_fresh.default:
                self.writer.alias(result, args[0])
            elif any(True for _ in tensor_leaves(result)):
                self.writer.call(("call_function", func, args, kwargs), result)

    def _record(
        self,
        call: TargetCall,
        func: Any,
        args: _Args,
        kwargs: _Kwargs,
        written: Any = (),
    ) -> Any:
        check_autocast()
        changes = call_mutates(*call[:2], call[3])  # or a layer does, which is alike
        with self.pause():
            old = [
                (self.writer.node_of(tensor), tensor, snapshot(tensor))
                for _, tensor in tensor_leaves(args if changes else written)
            ]
            outer, self._read = self._read, {}
            result = func(*args, **kwargs)
            call = self._with_numbers(call)
            self._read = outer
            results = {id(tensor) for _, tensor in tensor_leaves(result)}
            if results or (changes and result is None):
                for node, tensor, before in old:
                    if id(tensor) in results:
                        self.writer.keep_value(node, before)
                self.writer.call(call, result)
        return result

    def _with_numbers(self, call: TargetCall) -> TargetCall:
        """Write a number, as a size, where the call asked a buffer for it."""
        if not self._read:
            return call
        op, target, args, kwargs = call

        def number(value: Any) -> Any:
            return self._read.get(id(value), value)

        def plain(value: Any) -> Any:
            return fx.node.map_aggregate(value, number)

        args = tuple(plain(value) for value in args)
        return op, target, args, {key: plain(value) for key, value in kwargs.items()}

    @contextmanager
    def _at_user_line(self, leaf: str = "") -> Iterator[UserLine | None]:
        """Say where the user's code stands, and put errors there, or in a `leaf`."""
        line = self.writer.line = user_line(Tracer.run.__code__)
        try:
            if torch._C._functorch.maybe_current_level() is not None:
                raise TransformsError
            yield line
        except DATA_ERRORS as error:
            path = leaf or self.writer.module_path
            at = line.location if line else None
            self._error = self._error or data_error(error, at, path)
            raise self._error from error
        except GemscError as error:
            error.at = error.at or (line.location if line else None)
            self._error = self._error or error
            raise


@contextmanager
def _unknown(numbers: list[Any]) -> Iterator[None]:
    """Do as if several numbers at once were not known: no guard asks for them all."""
    several = [
        (number, number.constant)
        for number in numbers
        if number.constant is not None and number.constant.numel() > 1
    ]
    for number, _ in several:
        number.constant = None
    try:
        yield
    finally:
        for number, known in several:
            number.constant = known


@contextmanager
def _patched(tracer: Tracer) -> Iterator[None]:
    """Let module calls and custom autograd functions pass through the tracer."""
    function: Any = torch.autograd.Function
    below = function.__base__
    call: Any = nn.Module._call_impl  # to set __call__ would change subclasses: slow
    apply = function.__dict__["apply"]

    def traced_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tracer.call_module(call, self, args, kwargs)

    def traced_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return tracer.call_autograd_function(apply.__get__(None, cls), args, kwargs)

    def reached_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand below torch's own `apply`: what was taken before calls that."""
        if tracer.paused:
            return super(below, cls).apply(*args, **kwargs)
        return traced_apply(cls, *args, **kwargs)

    def made(context: Any, *_: Any) -> None:
        tracer.note_context(context)

    log = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        patched(nn.Module, _call_impl=traced_call),
        patched(function, apply=classmethod(traced_apply)),
        patched(below, apply=classmethod(reached_apply)),
        patched(BackwardCFunction, __init__=made),  # of each call of a function
        patched(log, disabled=True),  # it prints tracebacks that we report
        plain_scripts(),
    ):
        yield
