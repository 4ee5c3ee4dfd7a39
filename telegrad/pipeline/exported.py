"""A stage of a model whose forward pass was recorded, and the inputs of the first stage."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from telegrad.errors import UsageError
from telegrad.ext.workers import listed

_FILE = "<stage of a Pipeline>"  # shown in tracebacks


class GeneratedCode:
    """The operations of a graph, sent as their source: a `GraphModule` would trace itself again on the receiver."""

    # Tracing replaces `nn.Module.__call__` of the whole process, where other threads run modules meanwhile. Of the
    # globals of the source, modules are sent by name, and all other values as they are. `_run` is compiled anew by each
    # receiver.

    def __init__(self, module: fx.GraphModule) -> None:
        code = module.graph.python_code("self")
        used = {name: value for name, value in code.globals.items() if name in code.src}
        self._source = code.src
        self._imported = {name: value.__name__ for name, value in used.items() if isinstance(value, ModuleType)}
        self._names = {name: value for name, value in used.items() if name not in self._imported}
        self._inner = {
            name: GeneratedCode(inner) for name, inner in module.named_children() if isinstance(inner, fx.GraphModule)
        }
        self._device: torch.device | None = None  # None: as recorded
        self._compile()

    def _compile(self) -> None:
        defined = self._names | {name: importlib.import_module(path) for name, path in self._imported.items()}
        if self._device is not None:
            # The source writes a device as `device(type='cpu')`, and gets `device` from its globals.
            defined["device"] = lambda *_, **__: self._device
        vars(self).update(self._inner)
        exec(compile(self._source, _FILE, "exec", dont_inherit=True), defined)
        self._run: Callable[..., Any] = defined["forward"]

    def __call__(self, *args: Any) -> Any:
        return self._run(self, *args)

    def move(self, device: torch.device) -> None:
        """Make the operations that create tensors use another device."""
        self._device = device
        for inner in self._inner.values():
            inner.move(device)
        self._compile()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compile()


class Named(str):
    """The name of a value, as opposed to a constant."""


class StageProgram(NamedTuple):
    """The operations of a stage in one mode. A value has the name of the node that makes it."""

    code: GeneratedCode
    takes: Sequence[str]  # from the stage before
    needs: list[str]  # for its operations, in order
    makes: list[str]
    passes: list[Any]  # to the next stage; for the last stage the outputs, where constants stay as they are
    state: Mapping[str, str] = {}  # the stage's names of the parameters and buffers that it needs


class Use(NamedTuple):
    """A parameter, a buffer or a constant that a piece needs."""

    node: str
    path: str  # in the model
    constant: Any
    owners: set[str]  # the modules whose operations use it


class ExportedStage(nn.Module):
    """A part of a model, with the parameters and buffers that it uses under their names in the model."""

    def __init__(self, pieces: dict[bool, StageProgram], outputs: dict[bool, Any] | None, training: bool) -> None:
        """`outputs`: for the last stage, the structure of the outputs, with placeholders as leaves."""
        super().__init__()
        self._pieces = pieces
        self._outputs = outputs
        self.training = training
        self._prepared: dict[bool, tuple[list[tuple[nn.Module, str] | None], TreeSpec | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": {}}

    def _prepare(self, piece: StageProgram) -> tuple[list[tuple[nn.Module, str] | None], TreeSpec | None]:
        """Return the holders of the values that the operations need, None for inputs; and the outputs' structure."""
        paths = [piece.state[name].rpartition(".") if name in piece.state else None for name in piece.needs]
        form = tree_flatten(self._outputs[self.training])[1] if self._outputs is not None else None
        return [path and (self.get_submodule(path[0]), path[2]) for path in paths], form

    def forward(self, value: tuple[bool | None, Sequence[Any]]) -> Any:
        """Run the stage on the mode and values of the previous stage. Return the mode and values for the next."""
        mode, given = value
        if mode not in (None, self.training):
            raise UsageError(
                "the stages of a Pipeline are in different modes: call train() or eval() of the pipeline, not of one "
                "stage"
            )
        piece = self._pieces[self.training]
        if self.training not in self._prepared:
            self._prepared[self.training] = self._prepare(piece)
        places, form = self._prepared[self.training]
        have = dict(zip(piece.takes, given, strict=True))
        found = piece.code(*[getattr(*at) if at else have[name] for at, name in zip(places, piece.needs, strict=True)])
        have.update(zip(piece.makes, found if isinstance(found, tuple) else (found,), strict=True))
        passed = [have[each] if isinstance(each, Named) else each for each in piece.passes]
        return tree_unflatten(passed, form) if form is not None else (self.training, passed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the stage. Operations that make tensors are recorded with their device and data type."""
        own = next(iter(self.state_dict(keep_vars=True).values()), torch.empty(0, device="cpu"))
        before = torch.empty(0, dtype=own.dtype, device=own.device)
        moved = fn(before)
        if moved.dtype != before.dtype:
            raise UsageError(
                "the data types of a model are recorded when it is cut: change them before Pipeline.split, not after"
            )
        if moved.device != before.device:
            for piece in self._pieces.values():
                piece.code.move(moved.device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class Inputs:
    """The inputs of a model, in the form of the example: one value, a tuple of several, or a dictionary by names."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = type(model).__name__
        if example is None:
            raise UsageError(
                f"{self._model} is not an nn.Sequential that is cut between its children, so its forward must be "
                "recorded, which needs an example: Pipeline.split(model, workers, example=inputs), with a few inputs "
                "like those of forward_backward"
            )
        arguments = inspect.signature(model.forward).parameters.values()
        self._names = [each.name for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self._needed = [each.name for each in arguments if each.name in self._names and each.default is each.empty]
        by_name = {each.name for each in arguments if each.kind is each.KEYWORD_ONLY}
        self._spread = [name for name in self._names if name in self._needed or name not in by_name]  # over a tuple
        if not self._names:
            raise UsageError(
                f"{self._model}.forward has no named argument, so a pipeline does not know what to pass: wrap "
                "the model in a module whose forward(self, inputs, ...) names its arguments"
            )
        self.guards: list[Callable[..., None]] = []
        self._least = {True: 1, False: 1}  # minimum batch size, in training and in evaluation
        named, self._example = self._named(example), _in_words(example)
        leaves, self._form = tree_flatten(named)
        sizes = {len(leaf) if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)}
        if len(sizes) != 1 or 0 in sizes:
            raise UsageError(
                "`example` must consist of tensors with the samples along their first dimension, the same number in "
                "each"
            )
        self.leaves = resized(leaves, max(2, *sizes))  # torch.export treats a size of 1 as a constant
        self._passed: set[Any] = set()

    def named(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return values in the order of `leaves`, which are those of the example, by the names of the arguments."""
        found: dict[str, Any] = tree_unflatten(list(leaves), self._form)
        return found

    def _named(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, dict) and inputs and set(inputs) <= set(self._names) >= set(self._needed):
            return {name: inputs[name] for name in self._names if name in inputs}
        if not isinstance(inputs, (tuple, list)) or len(self._spread) < 2:
            return {(self._needed or self._names)[0]: inputs}
        names = self._needed if len(inputs) == len(self._needed) else self._spread
        named = dict(zip(names, inputs, strict=False))
        if len(inputs) > len(named) or not named.keys() >= set(self._needed):
            raise UsageError(
                f"{self._model}.forward takes the arguments {listed(self._spread)}, over which a tuple is spread, and "
                f"this one has {len(inputs)} elements. If it is one argument, or others are missing, pass a dictionary "
                f"by the names: {{{self._spread[0]!r}: ...}}"
            )
        return named

    def __call__(self, inputs: Any) -> tuple[None, list[Any]]:
        """Return the inputs of the first stage; raise UsageError if they have a different form than the example."""
        leaves, form = tree_flatten(self._named(inputs))
        if form != self._form:
            raise UsageError(
                f"{self._model} was cut with an example of another structure: the example was {self._example}, and "
                f"this input is {_in_words(inputs)}"
            )
        return None, leaves

    def check(self, part: tuple[None, Sequence[Any]], mode: bool) -> None:
        """Raise UsageError if the recorded operations of a mode (True: training) do not fit a micro-batch."""
        # The result depends only on shapes, types and constants, which are the same in most micro-batches: those that
        # have passed are remembered.
        _, leaves = part
        kinds = (mode, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if kinds in self._passed:
            return
        for leaf, wanted in zip(leaves, self.leaves, strict=True):
            if not isinstance(wanted, Tensor):
                if leaf != wanted:
                    raise self._other(f"it has {leaf!r} where the example had {wanted!r}")
            elif not isinstance(leaf, Tensor) or leaf.dtype != wanted.dtype or leaf.dim() != wanted.dim():
                raise self._other(f"it has {_kind(leaf)} where the example had {_kind(wanted)}")
            elif any(
                size < (2 if dim else self._least[mode]) <= own
                for dim, (size, own) in enumerate(zip(leaf.shape, wanted.shape, strict=True))
            ):
                raise self._other(f"sizes of 0 and 1 may be special cases, and it has {tuple(leaf.shape)}")
        try:
            for guard in self.guards:
                guard(*leaves)
        except AssertionError as error:
            raise self._other(str(error)) from error
        self._passed.add(kinds)

    def refuse_one(self, mode: bool) -> None:
        """Reject batches of one sample in this mode from now on: the model treats them differently."""
        self._least[mode] = 2
        self._passed.clear()

    def _other(self, why: str) -> UsageError:
        return UsageError(
            f"{self._model} was cut with an example, and its recorded forward does not fit this micro-batch: {why}. "
            "Cut it with a similar example, or pass other inputs"
        )


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype} with {value.dim()} dimensions" if isinstance(value, Tensor) else repr(value)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, dict):
        parts = [f"{key!r}{'' if isinstance(each, Tensor) else f' ({_in_words(each)})'}" for key, each in value.items()]
        return f"a dictionary with {listed(parts)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {listed(list(map(_in_words, value)))}"
    return f"a value of the type {type(value).__name__}"


def resized(leaves: Sequence[Any], size: int) -> list[Any]:
    """Return the tensors with `size` samples, some of them repeated."""
    return [
        leaf.detach()[torch.arange(size, device=leaf.device) % len(leaf)] if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]


def build_stages(
    model: nn.Module, pieces: Mapping[bool, Sequence[tuple[StageProgram, list[Use]]]], outputs: dict[bool, Any]
) -> list[tuple[nn.Module, list[str]]]:
    """Return stages of these pieces, and the names of the parameters and buffers of each."""
    held = {
        f"{path}.{name}".lstrip("."): (tensor, name not in module._non_persistent_buffers_set)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    order = {name: at for at, name in enumerate(held)}
    names: dict[Tensor, list[str]] = {}
    for name, (tensor, _) in held.items():
        names.setdefault(tensor, []).append(name)
    # A tensor may have several names in the model. A stage gets it under the names in modules whose operations it has,
    # so that the state has the names of the model. `split` adds all other names to a stage that has the tensor anyway.
    count = len(pieces[model.training])
    made: list[tuple[nn.Module, list[str]]] = []
    for number in range(count):
        found: dict[str, Any] = {}
        places: dict[bool, dict[str, str]] = {True: {}, False: {}}
        for mode in (True, False):
            for node, path, constant, owners in pieces[mode][number][1]:
                if path in held:
                    here = [name for name in names[held[path][0]] if name.rpartition(".")[0] in owners] or [path]
                    found.update((name, held[name][0]) for name in here)
                    places[mode][node] = here[0]
                else:
                    own = attribute_of(model, path)  # of the model, else of the recording
                    name = path if isinstance(own, Tensor) else f"_constants.{mode}.{path}".lower()
                    found[name] = own if isinstance(own, Tensor) else constant
                    places[mode][node] = name
        programs = {mode: own[number][0]._replace(state=places[mode]) for mode, own in pieces.items()}
        stage = ExportedStage(programs, outputs if number == count - 1 else None, model.training)
        for name in sorted(found, key=lambda name: order.get(name, len(order))):
            set_by_name(stage, name, found[name], nn.Module, name in held and held[name][1])
        made.append((stage, list(found)))
    return made


def attribute_of(model: nn.Module, path: str) -> Any:
    """Return an attribute of a module by its qualified name, or None."""
    owner, _, name = path.rpartition(".")
    try:
        return getattr(model.get_submodule(owner), name, None)
    except AttributeError:
        return None


def set_by_name(stage: nn.Module, name: str, value: Any, container: type[nn.Module], persistent: bool = False) -> None:
    """Set an attribute of `stage` by its qualified name. Create containers as needed."""
    *path, last = name.split(".")
    for step in path:
        if step not in stage._modules:
            stage.add_module(step, container())
        stage = stage.get_submodule(step)
    if getattr(stage, last, None) is value:
        return  # already there as part of a module
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        stage.register_buffer(last, value, persistent)
    else:
        setattr(stage, last, value)
