"""The stages of one rank: their modules, the tensors in them by name, what is frozen.

A frozen parameter has no gradient, so that the optimizer leaves it and its state alone.
Gradients flow through its stage to those before it as ever: no message changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gemsc.base.boxes import Interval
from gemsc.base.dtypes import cast_module
from gemsc.base.plain_forward import mend_torch
from gemsc.base.rng import are_draws_same, outside_draws
from gemsc.errors import GemscError
from gemsc.runtime.memory.once import made_tensors
from gemsc.runtime.process.stop import told_by_all
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.program import RankProgram, Run
from gemsc.weights.load import fill, model_state, put, stage_tensors, swap

Read = Callable[..., Tensor]  # of a tensor by its name, or of these rows of it

# of one forward that is compiled: for training and evaluation, for each replica on this
# rank, for sizes of batches, for what is frozen
MOST_FORMS = 256


def without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and format whose memory is to come."""
    empty = torch.empty_like(tensor, device=device)
    empty.untyped_storage().resize_(0)
    return empty


class _Blank(TorchFunctionMode):
    """Draws nothing for layers that get their weights later.

    `normal_` on the meta device, as `nn.Embedding` calls it, would load torch._dynamo:
    a second, and 75 MiB.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (nn.init.normal_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def keep_contents(stage: nn.Module) -> Callable[[], None]:
    """Return what gives a stage back all that its forward may change, as it is now.

    That are its buffers, in whose place forward may have put others, and parameters,
    such as those of a teacher.
    """
    before = [
        (module, name, buffer, buffer.clone())
        for module in stage.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    changed = map(stage.get_parameter, getattr(stage, "changed_parameters", ()))
    values = [(parameter, parameter.detach().clone()) for parameter in changed]

    def give_back() -> None:
        for module, name, buffer, value in before:
            module._buffers[name] = buffer
            buffer.data.copy_(value)  # autograd may hold it for micro-batches in flight
        for parameter, value in values:
            parameter.data.copy_(value)

    return give_back


@contextmanager
def without_trace(stage: nn.Module) -> Iterator[None]:
    """Run a stage for its outputs alone: no gradients, and its tensors as they were."""
    give_back = keep_contents(stage)
    with torch.no_grad():
        yield
    give_back()


class Stages(dict[Run, nn.Module]):
    """The module of each run; stages that hold the same parameter share it."""

    def __init__(self, stages: Mapping[Run, nn.Module] | None = None) -> None:
        super().__init__(stages or {})
        self._unread: dict[str, Read] = {}  # parameters that have no memory yet

    @cached_property
    def drawing(self) -> set[Run]:
        """Those that draw random numbers."""
        pairs = self.items()
        return {run for run, s in pairs if getattr(s, "draws_random_numbers", False)}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, those that replicas share once, in the order of stages.

        So ranks with the same stages of mirrored replicas have them in the same order.
        """
        stages = (self[run] for run in sorted(self, key=lambda run: run.stage))
        return {name: p for stage in stages for name, p in stage.named_parameters()}

    @cached_property
    def all_names(self) -> dict[str, str]:
        """The names that parameters have, each with that in `parameters`."""
        known = {id(p): name for name, p in self.parameters.items()}
        every = (s.named_parameters(remove_duplicate=False) for s in self.values())
        return {name: known[id(p)] for named in every for name, p in named}

    @cached_property
    def in_several(self) -> set[str]:
        """The names of parameters that different stages of this rank share."""
        pairs = {
            (n, run.stage) for run, s in self.items() for n, _ in s.named_parameters()
        }
        return {n for n, count in Counter(n for n, _ in pairs).items() if count > 1}

    def compiled(self) -> dict[Run, Callable[..., Any]]:
        """Return the forwards, each through torch.compile (Inductor) at its first call.

        Each is one graph: messages, streams and the update stay outside. Random numbers
        are those that the stage draws without it. In `same_draws` a stage that draws
        runs as it is: Inductor asks for numbers in its own way.

        Raises:
            GemscError: at the call: a stage cannot be compiled.
        """
        config: Any = torch._inductor.config
        config.compile_threads = 1  # no processes beside those that MPI has started
        config.fallback_random = True
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = MOST_FORMS
        return {run: self._compiled(run) for run in self}

    def _compiled(self, run: Run) -> Callable[..., Any]:
        stage = self[run]
        changed = getattr(stage, "changed_buffers", ())
        how: Any = {"fullgraph": True, "dynamic": False}
        compiled = (
            _compiled_apart(stage, changed, how)
            if changed
            else torch.compile(stage.forward, **how)
        )

        def forward(*inputs: Any) -> Any:
            if are_draws_same() and run in self.drawing:
                return stage(*inputs)
            try:
                with outside_draws():
                    return compiled(*inputs)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = str(error).strip().partition("\n")[0]
                raise GemscError(
                    f"torch.compile cannot take {run}: {reason}",
                    help="compile the model again without --torch-compile",
                ) from error

        return forward

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, non-persistent buffers included."""
        tensors = {n: t for s in self.values() for n, t in stage_tensors(s).items()}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def align(self) -> None:
        """Give replicas of a stage, which have buffers of their own, the same ones."""
        tensors = self.tensors()
        for stage in self.values():
            for name, buffer in stage.named_buffers():
                if tensors[name].data_ptr() != buffer.data_ptr():
                    buffer.copy_(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the user's model has: no tensors of the loss, no constants."""
        return {n: t for stage in self.values() for n, t in model_state(stage).items()}

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield parameters, buffers and what was made once; of replicas too."""
        for stage in self.values():
            yield from stage_tensors(stage).values()
            yield from made_tensors(stage)

    def set_mode(self, *, training: bool) -> None:
        """Switch all stages to training or evaluation, unless they are there."""
        for stage in self.values():
            if stage.training != training:
                stage.train(training)

    def add(
        self,
        run: Run,
        kind: type[nn.Module],
        read: Read,
        device: torch.device,
        dtype: torch.dtype | None,
        like: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Build a stage, give it its weights, and tie it to the other ones.

        `read(name)` returns a tensor in memory of its own. Tied are parameters that the
        model shares, and two replicas of a stage. With `like(name)`, which gives a
        tensor on the meta device, parameters are not read yet: see `rows`.
        """
        mend_torch()
        known = {n: p for stage in self.values() for n, p in stage.named_parameters()}
        with torch.device("meta"), _Blank():
            stage = kind()
        later = {n for n, _ in stage.named_parameters()} if like is not None else ()
        first = {name: like for name in later} if like is not None else {}
        fill(stage, lambda name: first.get(name, read)(name), device)
        if dtype is not None:
            cast_module(stage, dtype, getattr(kind, "keeps_dtype", ()))
        put(
            stage,
            {name: without_memory(stage.get_parameter(name), device) for name in later},
        )
        self._unread.update(dict.fromkeys(later, read))
        swap(stage, {id(p): known.get(n, p) for n, p in stage.named_parameters()})
        self[run] = stage

    def rows(self, name: str, rows: Interval) -> Tensor:
        """Return some rows of a parameter that has not been read, and reads no more."""
        parameter, read = self.parameters[name], self._unread.pop(name)
        return read(name, rows).to(parameter.device, parameter.dtype)

    def read_rest(self) -> None:
        """Read the parameters that have no memory, but for those given by `rows`."""
        while self._unread:
            name, read = self._unread.popitem()
            parameter = self.parameters[name]
            parameter.untyped_storage().resize_(parameter.nbytes)
            parameter.data.copy_(read(name))

    def share(self, others: Stages) -> frozenset[str]:
        """Take the tensors that other files' stages of the same runs have.

        Returns the parameters that have gradients in this file.
        """
        trained: set[str] = set()
        for run, stage in self.items():
            trained |= {n for n, p in stage.named_parameters() if p.requires_grad}
            known, tensors = stage_tensors(others[run]), stage_tensors(stage)
            swap(stage, {id(t): known[n] for n, t in tensors.items() if n in known})
        return frozenset(trained)


def _compiled_apart(
    stage: nn.Module, names: Sequence[str], how: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a stage's compiled forward, which changes these buffers after its graph.

    In a backward torch.compile may compute again from an input that its own forward
    has changed by then (pytorch/pytorch#197039): this graph changes none.
    """

    @partial(torch.compile, **how)
    def graph(buffers: dict[str, Tensor], *inputs: Any) -> Any:
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        return torch.func.functional_call(stage, copies, inputs), copies

    def forward(*inputs: Any) -> Any:
        buffers = {name: stage.get_buffer(name) for name in names}
        outputs, changed = graph({n: b.clone() for n, b in buffers.items()}, *inputs)
        for name, buffer in buffers.items():
            buffer.data.copy_(changed[name])
        return outputs

    return forward


class Freezing:
    """Which parameters are frozen at the moment; `names` are those of all ranks.

    Of parameters whose gradients are kept in parts, `in_parts` are this rank's rows.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Stages,
        transport: Transport,
        in_parts: Mapping[str, tuple[str, nn.Parameter]],
    ) -> None:
        self._program = program
        self._named = stages.parameters
        known = stages.all_names
        further = {a: n for a, n in program.aliases.items() if n in known}
        self._all_names = known | {alias: known[n] for alias, n in further.items()}
        self._transport = transport
        self._in_parts = in_parts
        self._never = {n for n, p in self._named.items() if not p.requires_grad}
        self.names: set[str] = set()

    def change(self, paths: Sequence[str], *, trains: bool) -> None:
        """Freeze what is under these paths, or train it again; all ranks call this.

        Raises:
            GemscError: the model has no such path, or it was compiled as frozen.
        """
        if self._program.branches:
            raise GemscError(
                "parameters cannot be frozen in a program with --branches",
                help="compile without --branches, or with requires_grad=False",
            )
        mine = self._all_names, [*self._never]
        call = "trainer.unfreeze()" if trains else "trainer.freeze()"
        everyone = told_by_all(self._transport, call, mine)
        names = {n: name for theirs, _ in everyone for n, name in theirs.items()}
        never = {name for _, theirs in everyone for name in theirs}
        chosen: set[str] = set()
        for path in paths:
            under = {names[n] for n in names if n == path or n.startswith(f"{path}.")}
            if not under:
                raise _unknown(path, names)
            chosen |= under
        if trains and (fixed := sorted(chosen & never)):
            raise GemscError(
                f"'{fixed[0]}' was frozen when the program was compiled, so no rank "
                "has messages for its gradient",
                help="compile with requires_grad=True, and freeze it at the start of "
                "the run",
            )
        self.set(self.names - chosen if trains else self.names | chosen)

    def set(self, names: Iterable[str]) -> None:
        """Freeze these parameters and no others, besides those that always are."""
        self.names = {*names}
        for name, parameter in self._named.items():
            if name not in self._never:
                parameter.requires_grad_(name not in self.names)
            if name in self.names:
                parameter.grad = None
                if name in self._in_parts:
                    self._in_parts[name][1].grad = None


def _unknown(path: str, names: Iterable[str]) -> GemscError:
    paths = {
        part
        for name in names
        for part in accumulate(name.split("."), lambda a, b: f"{a}.{b}")
    }
    close = get_close_matches(path, sorted(paths), n=1)
    there = sorted({name.split(".")[0] for name in names})
    advice = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(there)}"
    return GemscError(f"the model has no parameters under '{path}'", help=advice)
