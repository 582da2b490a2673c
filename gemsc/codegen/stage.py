"""One stage's nn.Module as text: its layers, and the user's lines that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from torch import Tensor, fx, nn

from gemsc.base.dtypes import CHANNELS_LAST, is_laid_out
from gemsc.codegen.expressions import Named, access, is_attribute
from gemsc.codegen.forward import write_forwards
from gemsc.codegen.python_text import quoted
from gemsc.codegen.rank_text import StageText
from gemsc.codegen.user_modules import tensor_source, user_module_source
from gemsc.codegen.writer import Names, Writer
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.flow import has_random
from gemsc.ir.holder import attributes_of
from gemsc.ir.layers import layer_source, norm_of_torch
from gemsc.ir.mutation import mutated_state, read_statistics
from gemsc.ir.opaque import changed_inside, opaque_of
from gemsc.ir.program import Program
from gemsc.weights.load import CONSTANTS

METHODS = ("forward_eval", "advance_state", "advance_state_eval")  # besides forward


def write_stage(writer: Writer, stage: StageText, named: Named) -> None:
    """Write the class; `named` gives the names of what stands at the module's top."""
    _StageWriter(writer, stage, named).write()


class _StageWriter:
    """Writes the class of a stage.

    `paths` are those of its lone tensors and of its layers, in model order; `whole`
    those of them where a user's own module is, which holds its own parts.
    """

    def __init__(self, writer: Writer, stage: StageText, named: Named) -> None:
        self.writer, self.stage, self.named = writer, stage, named
        self.module, self.aliases = stage.program.module, stage.program.aliases
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.paths = _paths_of(stage)
        self.whole = _whole_modules(stage.program, self.paths)
        self.norms = dict(self._norms())
        self.containers = self._containers()

    def write(self) -> None:
        writer, stage = self.writer, self.stage
        with writer.block(f"class {stage.class_name}({self.containers['']}):"):
            writer.docstring(stage.docstring)
            writer.line()
            if stage.tile is not None:
                writer.line("grid: Grid")
                writer.line()
            for attribute in self._attributes():
                writer.statement(attribute)
                writer.line()
            fixed = stage.program.frozen
            frozen = [path for path in self.paths if path in fixed]
            frozen += [path for path in sorted(fixed) if _holder(path, self.whole)]
            with writer.block("def __init__(self) -> None:"):
                writer.line("super().__init__()")
                self._write_layers()
                for line in self._formats():
                    writer.line(line)
                if frozen:
                    writer.line("self.train()")
            writer.line()
            if frozen:
                self._write_train(frozen)
            tops = (path.partition(".")[0] for path in self.paths)
            methods = Names([*dir(nn.ModuleDict()), *tops, *METHODS])
            write_forwards(writer, stage, self.named, methods)
        writer.line()
        writer.line()

    # ------------------------------------------------------ the class

    def _attributes(self) -> Iterator[str]:
        """Yield what kind of stage it is; what depends on data may draw, too."""
        flows = self.stage.flow, self.stage.evaluation
        if self.whole or any(has_random(flow.nodes) for flow in flows):
            yield "draws_random_numbers = True"
        if constants := self._staying_constants():
            yield f"keeps_dtype = {tuple(constants)}"
        kinds = self.module.named_parameters, self.module.named_buffers
        for tensors, what in zip(kinds, ("parameters", "buffers"), strict=True):
            held = dict(tensors(remove_duplicate=False)).keys()
            if changed := sorted(held & self._changed_tensors()):
                yield f"changed_{what} = {tuple(changed)}"

    def _staying_constants(self) -> list[str]:
        """Return the tensors, neither parameter nor buffer, that keep their dtype."""
        nodes = self.stage.program.graph.find_nodes(op="get_attr")
        stays = {str(node.target): meta.dtypes(node).value for node in nodes}
        # what only other graphs of the model use is as it was there
        return [n for n in self.stage.owned if stays.get(n, n.startswith(CONSTANTS))]

    def _changed_tensors(self) -> set[str]:
        """Return the tensors that the stage's forward changes.

        Statistics of layers are among them if the forward reads these itself.
        """
        changed: list[str] = []
        for node in self.stage.flow.nodes:
            changed += mutated_state(node, self.module)
            changed += changed_inside(node, self.module)
            changed += read_statistics(node, self.stage.program).values()
        owned = self.stage.owned
        return {n if n in owned else self.aliases.get(n, n) for n in changed}

    def _write_train(self, frozen: Sequence[str]) -> None:
        writer = self.writer
        with writer.block("def train(self, mode: bool = True) -> nn.Module:"):
            writer.line('"""Keep in evaluation mode what the model keeps in it."""')
            writer.line("super().train(mode)")
            layers = [
                f"self.get_submodule({quoted(path)})"
                if _holder(path, self.whole)
                else access(path)
                for path in frozen
            ]
            if len(layers) == 1:
                writer.line(f"{layers[0]}.eval()")
            else:
                writer.bracketed("for layer in (", layers, "):")
                with writer.indented():
                    writer.line("layer.eval()")
            writer.line("return self")
        writer.line()

    def _formats(self) -> Iterator[str]:
        """Yield the lines that give layers' weights the memory format of the model's.

        One line does for a stage, where all weights that a format is for have it.
        """
        tensors = {n: self.tensors[n] for n in self.stage.owned if n in self.tensors}
        images = {n for n, tensor in tensors.items() if tensor.dim() in CHANNELS_LAST}
        plain = {n for n in images if not is_laid_out(tensors[n])}
        for dims, form in CHANNELS_LAST.items():
            has = {n for n in images - plain if tensors[n].dim() == dims}
            if not has:
                continue
            layers = ["self"]
            if has != images:
                inside = (path for path in self.paths if _is_under(path, images, has))
                layers = [access(path) for path in inside]
            for layer in layers:
                yield f"{layer}.to(memory_format={form})"

    # --------------------------------------------------------- layers

    def _norms(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules of classes that derive from BatchNorm and have their own code.

        As one of torch they hold their tensors, and replicas join their statistics.
        """
        paths = self.paths.keys()
        for owner in dict.fromkeys(path.rpartition(".")[0] for path in paths):
            layer = norm_of_torch(self.module.get_submodule(owner))
            inside = (p for p in paths if p.startswith(f"{owner}."))
            names = (p.removeprefix(f"{owner}.").partition(".")[0] for p in inside)
            if owner and layer is not None and all(map(is_attribute, names)):
                keys = {f"{owner}.{name}" for name in layer.state_dict()}
                if keys <= paths & self.tensors.keys():
                    yield owner, layer

    def _containers(self) -> dict[str, str]:
        """Return the class of each module that holds others; '' is the stage itself.

        What has a name that cannot stand behind a dot is held as in a dictionary.

        Raises:
            GemscError: no class of torch.nn can hold all these names.
        """
        children: dict[str, dict[str, None]] = {"": {}}
        for path in self.paths:
            parts = path.split(".")
            for depth in range(len(parts)):
                names = children.setdefault(".".join(parts[:depth]), {})
                names[parts[depth]] = None
        parameters = dict(self.module.named_parameters())
        reserved = ["draws_random_numbers", "keeps_dtype"]
        reserved += ["changed_parameters", "changed_buffers"]
        reserved += METHODS
        reserved += ["grid"] if self.stage.tile is not None else []  # for the worker
        kinds = {}
        for container, names in children.items():
            odd = [name for name in names if not is_attribute(name)]
            held = [f"{container}.{name}".lstrip(".") in parameters for name in odd]
            cls = nn.ParameterDict if any(held) else nn.ModuleDict if odd else nn.Module
            kinds[container] = f"nn.{cls.__name__}"
            taken = () if container else reserved
            clash = [
                n for n in names if (is_attribute(n) and hasattr(cls, n)) or n in taken
            ]
            mixed = any(held) and not all(held)
            if clash or mixed or (any(held) and not container):  # no forward in a dict
                raise GemscError(
                    f"gemsc cannot write module '{container or 'model'}', which "
                    f"holds {', '.join(names)}",
                    help=f"rename {', '.join(clash or odd)}",
                )
        return kinds

    def _write_layers(self) -> None:
        """Write the lines of `__init__` that make a stage's tensors and layers."""
        made = {""}
        for path in self.paths:
            parts = path.split(".")
            for depth in range(1, len(parts)):
                container = ".".join(parts[:depth])
                if container not in made:
                    made.add(container)
                    self._write_container(container)
            if path in self.tensors:
                self._write_tensor(path, self.tensors[path])
            else:
                self._write_layer(path)
        for alias, first in self.aliases.items():
            is_held = alias.rpartition(".")[0] in self.paths or _holder(
                alias, self.whole
            )
            if is_held and first in self.stage.owned:
                self.writer.line(f"{self._tied(alias, first)}  # tied")

    def _write_container(self, path: str) -> None:
        place, layer = access(path), self.norms.get(path)
        if layer is None:
            self.writer.line(f"{place} = {self.containers[path]}()")
            return
        names = [f"{path}.{name}" for name in layer.state_dict()]
        note = self.stage.note_of(*names)
        self.writer.statement(f"{place} = {layer_source(layer)}", note)

    def _tied(self, path: str, first: str) -> str:
        """Return the statement that gives a tensor another name.

        A user's module holds lists, which take no names behind a dot.
        """
        source = access(first)
        if _holder(first, self.whole) not in (None, first.rpartition(".")[0]):
            source = f"operator.attrgetter({quoted(first)})(self)"
        owner, _, name = path.rpartition(".")
        if _holder(path, self.whole) in (None, owner):
            return f"{access(path)} = {source}"
        return f"setattr(self.get_submodule({quoted(owner)}), {quoted(name)}, {source})"

    def _write_layer(self, path: str) -> None:
        layer, line = self.module.get_submodule(path), self.writer.line
        opaque, place = opaque_of(layer), access(path)
        if opaque is not None:
            text = user_module_source(path, opaque, self.named)
            self.writer.statement(f"{place} = {text}")
            for name, parameter in opaque.module.named_parameters():
                owner = opaque.module.get_submodule(name.rpartition(".")[0])
                if not parameter.requires_grad and layer_source(owner) is not None:
                    inside = f"self.get_parameter({quoted(f'{path}.{name}')})"
                    line(f"{inside}.requires_grad_(False)")
            return
        source = layer_source(layer)
        if source is None:
            raise GemscError(
                f"gemsc cannot write the layer '{path}' ({type(layer).__name__})",
                help="build it from layers of torch.nn",
            )
        parameters = {f"{path}.{name}": p for name, p in layer.named_parameters()}
        self.writer.statement(f"{place} = {source}", self.stage.note_of(*parameters))
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                line(f"{access(name)}.requires_grad_(False)")

    def _write_tensor(self, path: str, tensor: Tensor) -> None:
        owner, _, name = path.rpartition(".")
        source, note = tensor_source(tensor), self.stage.note_of(path)
        if owner in self.norms:
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                self.writer.line(f"{access(path)}.requires_grad_(False)")
            return
        if isinstance(tensor, nn.Parameter):
            self.writer.statement(f"{access(path)} = {source}", note)
            return
        lost = name in self.module.get_submodule(owner)._non_persistent_buffers_set
        arguments = f"{name!r}, {source}{', persistent=False' * lost}"
        holder = access(owner) if owner else "self"
        self.writer.statement(f"{holder}.register_buffer({arguments})", note)


def _is_under(path: str, names: Iterable[str], some: Set[str]) -> bool:
    """Whether a layer holds some of the names, all of them among `some`."""
    inside = {name for name in names if name.startswith(f"{path}.")}
    return bool(inside) and inside <= some


def _paths_of(stage: StageText) -> dict[str, None]:
    """Return the paths of the stage's lone tensors and of its layers, in model order.

    A tied parameter is then found under its first name, as in the model.
    """
    flows = [stage.flow, stage.evaluation] if stage.apart else [stage.flow]
    nodes = [node for flow in flows for node in flow.nodes]
    called = {meta.layer(node) for node in nodes if uses_layer(node)}
    whole = _whole_modules(stage.program, called)
    layers = {name.rpartition(".")[0] for name in stage.owned} & called
    order = {
        path: n for n, (path, _) in enumerate(stage.program.module.named_modules())
    }
    lone = [name for name in stage.owned if name.rpartition(".")[0] not in layers]
    places = [(order.get(name.rpartition(".")[0], 0), name) for name in lone]
    places += [(order[path], path) for path in order if path in called]
    places.sort(key=lambda place: place[0])
    return dict.fromkeys(path for _, path in places if not _holder(path, whole))


def uses_layer(node: fx.Node) -> bool:
    """Whether a node calls a layer, or takes it or its tensors for a function."""
    inside = f"{meta.layer(node)}."
    return inside != "." and any(
        f"{p}.".startswith(inside) for p in attributes_of(node)
    )


def _whole_modules(program: Program, paths: Iterable[str]) -> list[str]:
    """Return those paths where a user's own module is, which holds its own parts."""
    modules = dict(program.module.named_modules())
    return [path for path in paths if opaque_of(modules.get(path)) is not None]


def _holder(path: str, whole: Sequence[str]) -> str | None:
    """Return the user's own module that a path lies in, if any."""
    return next((owner for owner in whole if path.startswith(f"{owner}.")), None)
