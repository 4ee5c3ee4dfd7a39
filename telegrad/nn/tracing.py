"""A model whose forward passes are recorded, and cut between two of their steps."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from telegrad.errors import UsageError
from telegrad.hints import hint

_GIVEN = ("placeholder", "get_attr")  # nodes that compute nothing
_WRITES = re.compile(r"\w*[^\W_]_|setitem|i(add|sub|mul|(true|floor)div|mod|pow|matmul|and|or|xor|[lr]shift)")
_FILE = "<stage of a Pipeline>"  # in tracebacks
_one_by_one = threading.RLock()  # guards what fx puts in the place of methods of all modules of this process


def record(whole: nn.Module, opened: set[str], needed: set[str]) -> Recording:
    """Trace the forward passes of the modules `opened`; all others are single steps.

    Raises:
        UsageError: one of them cannot be traced, and is `needed`; else it becomes a single step, too.
    """
    model = copy.copy(whole)  # the tracer leaves constants in it
    tracer = _Tracer(_inputs_of(model), opened)
    try:
        with _one_by_one, _untouched([whole, *map(whole.get_submodule, opened)]), tracer.told_of_functions():
            return Recording(model, tracer.trace(model), tracer.begun)
    except Exception as error:
        inside = tracer.inside[-1]
        if inside not in needed:
            return record(whole, opened - {inside}, needed)
        raise UsageError(
            f"{shown(model, inside)} cannot be cut, as torch.fx cannot trace its forward: {type(error).__name__}: "
            f"{error}\nWhat depends on the values of tensors must be in modules that are not cut themselves. Let the "
            "stages begin with other modules, or make them by hand: Pipeline([RemoteModule('worker1', First), ...])"
        ) from error


@contextlib.contextmanager
def _untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these may run their forward passes; their attributes are as before then."""
    kept = [(vars(each), {name: _copied(value) for name, value in vars(each).items()}) for each in modules]
    try:
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)


def _copied(value: Any) -> Any:
    return value.copy() if type(value) is dict else value


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()


def shown(model: nn.Module, name: str) -> str:
    """A module of the model, for users."""
    kind = type(model.get_submodule(name)).__name__
    return f"{name!r} ({kind})" if name else f"the model ({kind})"


def can_open(module: nn.Module) -> bool:
    """It has parts, and is none of those modules of torch that use the parameters of theirs without calling them."""
    return bool(module._modules) and not fx.Tracer().is_leaf_module(module, "")


def _inputs_of(model: nn.Module) -> list[inspect.Parameter]:
    """The arguments that the model must be given; others keep their defaults."""
    _, *arguments = inspect.signature(type(model).forward).parameters.values()
    named = [each for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    found = [each for each in named if each.default is each.empty]
    if not found:
        raise UsageError(
            f"{type(model).__name__}.forward needs no argument, so that it is not clear what a pipeline gives it: "
            "wrap the model in a module whose forward(self, inputs, ...) names what it takes"
        )
    return found


class _Tracer(fx.Tracer):
    """Opens some modules."""

    proxy_buffer_attributes = True  # else what is made of buffers would be a constant

    def __init__(self, inputs: Sequence[inspect.Parameter], opened: set[str]) -> None:
        super().__init__()
        self.begun: dict[str, int] = {}  # how many nodes there were when a module was called first
        self.inside = [""]
        self._inputs = inputs
        self._opened = opened
        self._thread = threading.get_ident()
        self._modes = _modes()

    @contextlib.contextmanager
    def told_of_functions(self) -> Iterator[None]:
        """Inside, functions whose backward would be lost are refused."""
        own = Function.__dict__["apply"]

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread and any(isinstance(each, fx.Proxy) for each in args):
                raise TypeError(f"{cls.__name__} is a torch.autograd.Function, whose backward would be lost")
            return own.__get__(None, cls)(*args, **kwargs)

        Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Function.apply = own  # type: ignore[method-assign]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes and threading.get_ident() == self._thread:
            raise TypeError("it changes the grad mode or autocast, which would be lost")
        return super().create_node(*args, **kwargs)

    def create_args_for_root(self, root_fn: Callable[..., Any], *_: Any) -> tuple[Any, list[Any]]:
        given = {each.name: self.create_proxy("placeholder", each.name, (), {}) for each in self._inputs}
        named = {each.name: given.pop(each.name) for each in self._inputs if each.kind is each.KEYWORD_ONLY}
        return lambda *args: root_fn(*args, **named), [self.root, *given.values()]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    # Both stand in the place of methods of all modules of this process while this thread traces

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        self.begun.setdefault(name, len(self.graph.nodes))
        if name not in self._opened:
            return super().call_module(m, forward, args, kwargs)
        self.inside.append(name)
        found = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return found

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class Recording:
    """The steps of a model's forward pass."""

    def __init__(self, model: nn.Module, graph: fx.Graph, begun: dict[str, int]) -> None:
        self._model = model
        nodes = list(graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._steps = [node for node in nodes[:-1] if node.op not in _GIVEN]
        self._output = nodes[-1]
        self._begun = {name: sum(node.op not in _GIVEN for node in nodes[:at]) for name, at in begun.items()}

    @property
    def called(self) -> list[str]:
        """The modules that are single steps, each once, in order."""
        return list(dict.fromkeys(node.target for node in self._steps if node.op == "call_module"))

    def step_of(self, name: str) -> int | None:
        """How many steps come before the first of a module; None where it is not called."""
        names = {module: own for own, module in self._model.named_modules()}
        return self._begun.get(names[self._model.get_submodule(name)])

    def cut(self, starts: Sequence[int]) -> list[tuple[nn.Module, list[str]]]:
        """The stages, and what of the model each has."""
        stage_of = dict.fromkeys(self._inputs, 0)
        stage_of |= {node: bisect_right(starts, at) for at, node in enumerate(self._steps)}
        stage_of[self._output] = len(starts)
        self._check_changed(stage_of)
        last = {node: max([stage_of[user] for user in node.users], default=0) for node in stage_of}
        made: list[tuple[nn.Module, list[str]]] = []
        given = self._inputs
        for number, (start, end) in enumerate(pairwise([0, *starts, len(self._steps)])):
            passed = [node for node in stage_of if stage_of[node] <= number < last[node]]
            output = self._output.args[0] if number == len(starts) else passed[0] if len(passed) == 1 else tuple(passed)
            graph = _graph_of(given, self._steps[start:end], output)
            made.append((TracedStage(self._model, graph), _targets(graph)))
            given = passed
        return made

    def _check_changed(self, stage_of: dict[fx.Node, int]) -> None:
        """Raise UsageError where a stage changes a buffer of which another one has a copy."""
        users: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
        for node in self._output.graph.nodes:
            if node.op == "get_attr":
                users.setdefault(str(node.target), []).extend((user, node) for user in node.users)
        for name, found in users.items():
            stages = {stage_of[user] for user, _ in found}
            if len(stages) > 1 and any(_changes(user, value) for user, value in found):
                raise UsageError(
                    f"{name!r} is used by the stages {sorted(stages)}, and changed in place by one: the others, which "
                    "have copies of it, would not see that. Cut elsewhere, or have one module alone use it"
                )


def _changes(step: fx.Node, value: fx.Node) -> bool:
    """Whether a step writes to a value, by the names that torch and Python give to what does."""
    name = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "")
    return (step.args[:1] == (value,) and bool(_WRITES.fullmatch(name))) or step.kwargs.get("out") is value


def _graph_of(given: Iterable[fx.Node], steps: Iterable[fx.Node], output: Any) -> fx.Graph:
    """Of one stage."""
    graph = fx.Graph()
    own = {node: graph.placeholder(str(node.target if node.op == "placeholder" else node.name)) for node in given}

    def owned(node: fx.Node) -> fx.Node:
        if node not in own:  # a parameter or a buffer
            own[node] = graph.node_copy(node)
        return own[node]

    for node in steps:
        for needed in node.all_input_nodes:
            owned(needed)
        own[node] = graph.node_copy(node, owned)
    graph.output(fx.node.map_arg(output, owned))
    return graph


def _targets(graph: fx.Graph) -> list[str]:
    """The modules, parameters and buffers that are used, those that are inside of others last."""
    return sorted({str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")})


def hint_at_modes(model: nn.Module, opened: Iterable[str]) -> None:
    """Warn where what is recorded may depend on the training mode."""
    for name in sorted(opened):
        if "training" in _attributes_used(type(model.get_submodule(name))):
            hint(
                "recorded mode",
                f"{shown(model, name)} looks at self.training, which is recorded as it was when the model was cut: "
                "train() and eval() do not change it any more. Use a module for what depends on it, such as nn.Dropout",
            )


def _attributes_used(kind: type[nn.Module]) -> Iterator[str]:
    """By the methods of a class, and of those that it derives from."""
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for method in vars(each).values():
            if isinstance(method, FunctionType):
                yield from method.__code__.co_names


class TracedStage(nn.Module):
    """Steps of a model's forward pass, with the modules, parameters and buffers that they use under their names.

    It travels as the source of a function, as to make it of a graph would be to trace it once more, at its worker.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        for name in _targets(graph):
            _adopt(self, model, name)
        self._takes_several = sum(node.op == "placeholder" for node in graph.nodes) != 1
        code = graph.python_code("self")
        used = _compiled(code.src, code.globals).__code__.co_names
        globals_ = {name: value for name, value in code.globals.items() if name in used}
        self._source = code.src
        self._imported = {name: value.__name__ for name, value in globals_.items() if isinstance(value, ModuleType)}
        self._names = {name: value for name, value in globals_.items() if name not in self._imported}
        self._compile()

    def _compile(self) -> None:
        imported = {name: importlib.import_module(path) for name, path in self._imported.items()}
        self._run: Callable[..., Any] = _compiled(self._source, {**self._names, **imported})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()

    def forward(self, value: Any) -> Any:
        """Several inputs of a model come as a tuple, or as a dictionary by their names."""
        if self._takes_several and isinstance(value, dict):
            return self._run(self, **value)
        if self._takes_several and isinstance(value, (tuple, list)):
            return self._run(self, *value)
        return self._run(self, value)


def _compiled(source: str, names: dict[str, Any]) -> FunctionType:
    defined = dict(names)
    exec(compile(source, _FILE, "exec", dont_inherit=True), defined)
    found: FunctionType = defined["forward"]
    return found


def _adopt(stage: nn.Module, model: nn.Module, name: str) -> None:
    """Have what is in the model under a name in a stage, too."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    value = getattr(owner, last)
    put(stage, name, value, nn.Module, last in owner._buffers and last not in owner._non_persistent_buffers_set)


def put(stage: nn.Module, name: str, value: Any, container: type[nn.Module], persistent: bool = False) -> None:
    """Let `stage` have this, inside of containers where its name says so."""
    *path, last = name.split(".")
    for step in path:
        if step not in stage._modules:
            stage.add_module(step, container())
        stage = stage.get_submodule(step)
    if getattr(stage, last, None) is value:
        return  # as a part of a module that is there
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        stage.register_buffer(last, value, persistent)
    else:
        setattr(stage, last, value)
