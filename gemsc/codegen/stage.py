"""One stage's nn.Module as text: its layers, and the user's lines that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from torch import Tensor, fx, nn

from gemsc.base.dtypes import CHANNELS_LAST, is_laid_out
from gemsc.codegen.expressions import Named, access, as_tuple, is_attribute, quoted
from gemsc.codegen.forward import write_forwards
from gemsc.codegen.rank_text import StageText
from gemsc.codegen.user_modules import tensor_source, user_module_source
from gemsc.codegen.writer import Names, Writer, split_arguments
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.flow import has_random
from gemsc.ir.holder import attributes_of
from gemsc.ir.layers import layer_source
from gemsc.ir.mutation import mutated_state
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import Program


def write_stage(writer: Writer, stage: StageText, named: Named) -> None:
    """Write the class; `named` gives the names of what stands at the module's top."""
    base = _containers(stage)[""]
    with writer.block(f"class {stage.class_name}({base}):"):
        writer.docstring(stage.docstring)
        writer.line()
        paths = _paths_of(stage)
        whole = _whole_modules(stage.program, paths)
        for line in _attributes(stage):
            writer.line(line)
            writer.line()
        frozen = [path for path in paths if path in stage.program.frozen]
        frozen += [p for p in sorted(stage.program.frozen) if _holder(p, whole)]
        with writer.block("def __init__(self) -> None:"):
            writer.line("super().__init__()")
            _write_layers(writer, stage, named)
            for line in _formats(stage, paths):
                writer.line(line)
            if frozen:
                writer.line("self.train()")
        writer.line()
        if frozen:
            _write_train(writer, frozen, whole)
        write_forwards(writer, stage, named, _method_names(stage))
    writer.line()
    writer.line()


def _formats(stage: StageText, paths: Iterable[str]) -> Iterator[str]:
    """Yield the lines that give layers' weights the memory format of the model's.

    One line does for a stage, where all weights that a format is for have it.
    """
    found = _tensors(stage.program.module)
    tensors = {name: found[name] for name in stage.owned if name in found}
    images = {n for n, tensor in tensors.items() if tensor.dim() in CHANNELS_LAST}
    plain = {n for n in images if not is_laid_out(tensors[n])}
    for dims, form in CHANNELS_LAST.items():
        has = {n for n in images - plain if tensors[n].dim() == dims}
        if not has:
            continue
        layers = ["self"]
        if has != images:
            layers = [access("self", p) for p in paths if _is_under(p, images, has)]
        for layer in layers:
            yield f"{layer}.to(memory_format={form})"


def _is_under(path: str, names: Iterable[str], some: Set[str]) -> bool:
    """Whether a layer holds some of the names, all of them among `some`."""
    inside = {name for name in names if name.startswith(f"{path}.")}
    return bool(inside) and inside <= some


def _attributes(stage: StageText) -> Iterator[str]:
    """Yield the lines that say what kind of stage it is."""
    if stage.tile is not None:
        yield "grid: Grid"
    if has_random(stage.flow.nodes):
        yield "draws_random_numbers = True"
    if constants := _staying_constants(stage):
        yield f"keeps_dtype = {as_tuple(constants)}"
    if changed := _changed_parameters(stage):
        yield f"changed_parameters = {as_tuple(changed)}"


def _method_names(stage: StageText) -> Names:
    """Return names for further methods, apart from all that the class has."""
    tops = (path.partition(".")[0] for path in _paths_of(stage))
    return Names([*dir(nn.ModuleDict()), *tops, "forward_eval"])


def _write_train(writer: Writer, frozen: Sequence[str], whole: Sequence[str]) -> None:
    with writer.block("def train(self, mode: bool = True) -> nn.Module:"):
        writer.line('"""Keep in evaluation mode what the model keeps in it."""')
        writer.line("super().train(mode)")
        layers = [
            f"self.get_submodule({quoted(path)})"
            if _holder(path, whole)
            else access("self", path)
            for path in frozen
        ]
        if len(layers) == 1:
            writer.line(f"{layers[0]}.eval()")
        else:
            writer.items("for layer in (", layers, "):")
            with writer.indented():
                writer.line("layer.eval()")
        writer.line("return self")
    writer.line()


def _staying_constants(stage: StageText) -> list[str]:
    """Return the tensors that are neither parameter nor buffer and keep their dtype."""
    nodes = stage.program.graph.find_nodes(op="get_attr")
    staying = {str(node.target) for node in nodes if meta.dtypes(node).value}
    return [name for name in stage.owned if name in staying]


def _changed_parameters(stage: StageText) -> list[str]:
    """Return the parameters that the stage's forward changes."""
    module, aliases = stage.program.module, stage.program.aliases
    found: list[str] = []
    for node in stage.flow.nodes:
        found += mutated_state(node, module)
        if node.op == "call_module":
            opaque = opaque_of(module.get_submodule(str(node.target)))
            inside = opaque.changes if opaque is not None else ()
            found += [f"{node.target}.{name}" for name in inside]
    names = [name if name in stage.owned else aliases.get(name, name) for name in found]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return sorted({name for name in names if name in parameters})


# ------------------------------------------------------------------ layers


def _paths_of(stage: StageText) -> dict[str, None]:
    """Return the paths of the stage's lone tensors and of its layers, in model order.

    A tied parameter is then found under its first name, as in the model.
    """
    flows = [stage.flow, stage.evaluation] if stage.apart else [stage.flow]
    nodes = [node for each in flows for node in each.nodes]
    called = {meta.layer(node) for node in nodes if _uses_layer(node)}
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


def _uses_layer(node: fx.Node) -> bool:
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
    return next((each for each in whole if path.startswith(f"{each}.")), None)


def _write_layers(writer: Writer, stage: StageText, named: Named) -> None:
    """Write the lines of `__init__` that make a stage's tensors and layers."""
    kinds = _containers(stage)
    made = {""}
    paths, tensors = _paths_of(stage), _tensors(stage.program.module)
    whole = _whole_modules(stage.program, paths)
    for path in paths:
        parts = path.split(".")
        for depth in range(1, len(parts)):
            container = ".".join(parts[:depth])
            if container not in made:
                made.add(container)
                writer.line(f"{access('self', container)} = {kinds[container]}()")
        if path in tensors:
            _write_tensor(writer, path, tensors[path], stage)
        else:
            _write_layer(writer, path, stage, named)
    for alias, first in stage.program.aliases.items():
        is_held = alias.rpartition(".")[0] in paths or _holder(alias, whole)
        if is_held and first in stage.owned:
            writer.line(f"{_tied(alias, _read(first, whole), whole)}  # tied")


def _read(path: str, whole: Sequence[str]) -> str:
    """Return how to name a tensor; a user's module holds lists that take no names."""
    if _holder(path, whole) in (None, path.rpartition(".")[0]):
        return access("self", path)
    return f"operator.attrgetter({quoted(path)})(self)"


def _tied(path: str, source: str, whole: Sequence[str]) -> str:
    """Return the statement that gives a tensor another name."""
    owner, _, name = path.rpartition(".")
    if _holder(path, whole) in (None, owner):
        return f"{access('self', path)} = {source}"
    return f"setattr(self.get_submodule({quoted(owner)}), {quoted(name)}, {source})"


def _containers(stage: StageText) -> dict[str, str]:
    """Return the class of each module that holds others; '' is the stage itself.

    What has a name that cannot stand behind a dot is held as in a dictionary.

    Raises:
        GemscError: no class of torch.nn can hold all these names.
    """
    children: dict[str, dict[str, None]] = {"": {}}
    for path in _paths_of(stage):
        parts = path.split(".")
        for depth in range(len(parts)):
            names = children.setdefault(".".join(parts[:depth]), {})
            names[parts[depth]] = None
    parameters = dict(stage.program.module.named_parameters())
    kinds = {}
    for container, names in children.items():
        odd = [name for name in names if not is_attribute(name)]
        held = [".".join([container, name]).lstrip(".") in parameters for name in odd]
        cls = nn.ParameterDict if any(held) else nn.ModuleDict if odd else nn.Module
        kinds[container] = f"nn.{cls.__name__}"
        taken = () if container else _own_attributes(stage)
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


def _own_attributes(stage: StageText) -> Sequence[str]:
    """Return what a stage's class says of itself, for the worker."""
    always = ("draws_random_numbers", "keeps_dtype", "changed_parameters")
    return always if stage.tile is None else (*always, "grid")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _write_layer(writer: Writer, path: str, stage: StageText, named: Named) -> None:
    layer = stage.program.module.get_submodule(path)
    opaque = opaque_of(layer)
    if opaque is not None:
        text = user_module_source(path, opaque, named)
        head, arguments, tail = split_arguments(text)
        writer.call(f"{access('self', path)} = {head}", arguments, tail)
        _write_fixed(writer, path, opaque.module)
        return
    source = layer_source(layer)
    if source is None:
        raise GemscError(
            f"gemsc cannot write layer '{path}' ({type(layer).__name__})",
            help="build it from layers of torch.nn",
        )
    head, arguments, tail = split_arguments(source)
    note = stage.note_of(*(f"{path}.{name}" for name, _ in layer.named_parameters()))
    writer.call(f"{access('self', path)} = {head}", arguments, tail, note)
    for name, parameter in layer.named_parameters():
        if not parameter.requires_grad:
            writer.line(f"{access('self', f'{path}.{name}')}.requires_grad_(False)")


def _write_fixed(writer: Writer, path: str, module: nn.Module) -> None:
    """Switch off the gradients of layers' parameters inside a user's module."""
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if not parameter.requires_grad and layer_source(owner) is not None:
            found = f"self.get_parameter({quoted(f'{path}.{name}')})"
            writer.line(f"{found}.requires_grad_(False)")


def _write_tensor(writer: Writer, path: str, tensor: Tensor, stage: StageText) -> None:
    owner, _, name = path.rpartition(".")
    module, note = stage.program.module, stage.note_of(path)
    if isinstance(tensor, nn.Parameter):
        head, arguments, tail = split_arguments(tensor_source(tensor))
        writer.call(f"{access('self', path)} = {head}", arguments, tail, note)
        return
    arguments = [quoted(name), tensor_source(tensor)]
    if name in module.get_submodule(owner)._non_persistent_buffers_set:
        arguments.append("persistent=False")
    holder = access("self", owner) if owner else "self"
    writer.call(f"{holder}.register_buffer(", arguments, note=note)
