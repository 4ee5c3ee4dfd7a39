"""A model's forward pass as recorded by `torch.export`, cut between operations.

An exported program is a graph of operators without Python; parameters and buffers are inputs of it. A model is recorded
twice, in training and in evaluation mode, and both recordings are cut where the same modules begin. A stage has the
operations of both, and the parameters and buffers that they use, under their names in the model.

The recorded operations read and write memory, and stages on different workers share none. So if an operation writes to
memory, according to the schema of its operator, no stage after a cut may read that memory through another tensor:
`RecordedProgram.cut` refuses that. A recording omits Python state, and functions with their own backward. Only the
comparison in `comparison` detects these.
"""

import contextlib
import operator
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from telegrad.errors import UsageError
from telegrad.ext.host import forks, renewed
from telegrad.pipeline.exported import GeneratedCode, Named, StageProgram, Use

_one_by_one = renewed(threading.RLock())  # guards the methods that torch.fx replaces in all modules of this process


@contextlib.contextmanager
def _this_thread_alone() -> Iterator[None]:
    """Keep torch.fx, which traces calls of modules in the whole process, from recording those of other threads."""
    here = forks.thread()

    def guarded(own: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (own if forks.thread() == here else otherwise)(*args)

    replaced: list[tuple[type, str, Any]] = []
    with _one_by_one:
        try:
            for kind in _with_subclasses(fx.Tracer):
                for name, otherwise in (
                    ("call_module", lambda _, module, forward, args, kwargs: forward(*args, **kwargs)),
                    ("getattr", lambda _, name, value, cache: value),
                ):
                    if own := vars(kind).get(name):
                        replaced.append((kind, name, own))
                        setattr(kind, name, guarded(own, otherwise))
            yield
        finally:
            for kind, name, own in replaced:
                setattr(kind, name, own)


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


class CutPoint(NamedTuple):
    """A place where a stage can begin."""

    name: str  # of the module that begins there
    before: int  # number of trained values before it
    crossing: int  # number of values that go from one stage to the next


class RecordedProgram:
    """The operations of a model in one mode."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        with _this_thread_alone(), torch.inference_mode(False), torch.enable_grad():
            exported = _exported(model, inputs)
            checked = exported.module()
        # `module()` adds the guards, which the graph itself does not have, as submodules that raise AssertionError.
        self.guards = [checked.get_submodule(str(each.target)) for each in checked.graph.find_nodes(op="call_module")]
        form = exported.module_call_graph[0].signature.out_spec
        self.outputs = tree_unflatten([0] * form.num_leaves, form)
        self._graph = exported.graph_module
        nodes = list(self._graph.graph.nodes)
        given = self._graph.graph.find_nodes(op="placeholder")
        specs = dict(zip(given, exported.graph_signature.input_specs, strict=True))
        self.state = {node: str(spec.target) for node, spec in specs.items() if spec.kind != InputKind.USER_INPUT}
        self._constants = exported.constants
        self._sizes = {
            node: exported.state_dict[self.state[node]].numel()
            for node, spec in specs.items()
            if spec.kind == InputKind.PARAMETER
        }
        self.inputs = [node for node, spec in specs.items() if spec.kind == InputKind.USER_INPUT]
        self.steps = [node for node in nodes[:-1] if node.op == "call_function"]
        self.output = nodes[-1]
        known = dict(model.named_modules(remove_duplicate=False))
        self.first_operation: dict[str, int] = {}  # index of the first operation of each module
        for at, node in enumerate(self.steps):
            for path in _modules_of(node):
                if path in known:
                    self.first_operation.setdefault(path, at)

    def cut_points(self) -> tuple[list[CutPoint], int]:
        """Return where stages can begin, and the number of trained values. Of the places between the same two
        parameters, only the one that the fewest values cross is returned."""
        # `crossing` first holds differences: a value counts from the operation behind the one that makes it up to its
        # last user. `accumulate` makes numbers of them. Parameters and buffers do not cross, since a stage holds its
        # own.
        place = {node: at for at, node in enumerate(self.steps)}
        sizes = [0] * (len(self.steps) + 1)  # trained values per operation, with each parameter at its first use
        crossing = [0] * (len(self.steps) + 2)
        for node in (*self._sizes, *self.inputs, *self.steps):
            users = [place.get(user, len(self.steps)) for user in node.users]
            if users and node in self._sizes:
                sizes[min(users)] += self._sizes[node]
            elif users:
                crossing[place.get(node, -1) + 1] += 1
                crossing[max(users) + 1] -= 1
        before, across = [0, *accumulate(sizes)], list(accumulate(crossing))
        points = [CutPoint(name, before[at], across[at]) for name, at in self.first_operation.items()]
        best: dict[int, CutPoint] = {}
        for point in sorted(points, key=attrgetter("before", "crossing")):
            if 0 < point.before < before[-1]:
                best.setdefault(point.before, point)
        return [*best.values()], before[-1]

    def cut(self, starts: Sequence[int]) -> list[tuple[StageProgram, list[Use]]]:
        """Cut before these operations; raise UsageError if one piece writes to memory that another one reads."""
        stage_of = {node: bisect_right(starts, at) for at, node in enumerate(self.steps)}
        stage_of[self.output] = len(starts)
        memory = _SharedMemory(self, stage_of)
        memory.place_assignments()
        memory.check()
        parts = split_module(self._graph, self._graph, stage_of.__getitem__, keep_original_node_name=True)
        # A stage takes what the stage before passes on, and passes on all that a later stage uses, also values of
        # earlier stages. Names are those of the nodes in the whole graph, so both sides need no further agreement.
        last = {node.name: max(map(stage_of.__getitem__, node.users), default=0) for node in self._graph.graph.nodes}
        results = list(fx.node.map_arg(self.output.args[0], lambda node: Named(node.name)))
        made: list[tuple[StageProgram, list[Use]]] = []
        have = [Named(node.name) for node in self.inputs]
        for number in range(len(starts) + 1):
            part = parts.get_submodule(f"submod_{number}")
            assert isinstance(part, fx.GraphModule)
            takes, needs = have, [str(node.target) for node in part.graph.find_nodes(op="placeholder")]
            makes = [node.name for node in part.graph.output_node().all_input_nodes]
            have = [Named(name) for name in dict.fromkeys([*takes, *makes]) if last[name] > number]
            uses = [
                Use(
                    node.name,
                    path,
                    self._constants.get(path),
                    {_modules_of(user)[-1] for user in node.users if stage_of[user] == number},
                )
                for node, path in self.state.items()
                if node.name in needs
            ]
            passes = have if number < len(starts) else results
            made.append((StageProgram(GeneratedCode(part), takes, needs, makes, passes), uses))
        return made


def _exported(model: nn.Module, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
    """Record by running the forward pass; if that fails, or makes sizes constants, by reading its bytecode, since only
    that keeps len(x) and int(x.shape[0]) symbolic."""
    shapes = tree_map(_dimensions, inputs)
    found: list[torch.export.ExportedProgram] = []
    errors: list[Exception] = []
    for strict in (False, True):
        try:
            exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict)
        except Exception as error:
            errors.append(error)
            continue
        for name, value in exported.constants.items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                raise TypeError(f"it accesses a tensor without torch's operators, as .data does ({name})")
        found.append(exported)
        given = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")][-len(tree_leaves(inputs)) :]
        if not any(is_concrete_int(each.shape[0]) for each in given if isinstance(each, Tensor)):
            return exported
    if not found:
        raise errors[0]
    return found[0]


def _dimensions(leaf: Any) -> list[Any] | None:
    """Return the dimensions that may have other sizes. Torch treats sizes 0 and 1 as constants, and warns if asked."""
    return [Dim.AUTO if size > 1 else Dim.STATIC for size in leaf.shape] if isinstance(leaf, Tensor) else None


def _modules_of(node: fx.Node) -> list[str]:
    """Return the names of the modules that contain an operation, from the model inwards."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()] or [""]


class _SharedMemory:
    """The nodes of a program that share memory, and the operations that write to it, by the operators' schemas."""

    def __init__(self, program: RecordedProgram, stage_of: dict[fx.Node, int]) -> None:
        self._stage_of = stage_of
        self._state = program.state
        self._above: dict[fx.Node, fx.Node] = {}
        self._writes: list[tuple[fx.Node, fx.Node]] = []  # operations of the program, and the values that they write to
        self._follow(program.steps, None)
        self._groups: dict[fx.Node, list[fx.Node]] = {}
        for node in (*program.state, *program.inputs, *program.steps):
            self._groups.setdefault(self._root(node), []).append(node)

    def _follow(self, nodes: Iterable[fx.Node], outer: fx.Node | None) -> None:
        """Record effects of operations; `outer` is the one that contains them, such as one with another grad mode."""
        for node in nodes:
            for value, is_written, is_shared in _effects(node):
                if is_shared:
                    self._join(value, node)
                if is_written:
                    self._writes.append((outer or node, value))
            for part, given in _parts_of(node):
                for value, own in zip(given, part.graph.find_nodes(op="placeholder"), strict=True):
                    self._join(own, value)
                self._follow(part.graph.nodes, outer or node)
                for result in part.graph.output_node().all_input_nodes:
                    self._join(result, node)

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self._root(one), self._root(other)
        if one is not other:
            self._above[one] = other

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._above:
            node = self._above[node]
        return node

    def _group(self, value: fx.Node) -> list[fx.Node]:
        return self._groups.get(self._root(value), [])

    def place_assignments(self) -> None:
        """Move copies to buffers from the end of the program to where the buffer was assigned."""
        # torch.export makes `self.seen = value` a copy at the end of the program. There it would belong to the last
        # stage, which does not hold the buffer. It must come after all other uses of the buffer, and after the value
        # and the writes to its memory.
        assigned = {
            node: buffer
            for node, buffer in self._writes
            if not node.users and buffer in self._state and node.target is torch.ops.aten.copy_.default
        }
        for node, buffer in assigned.items():
            users = [user for each in self._group(buffer) for user in each.users if user not in assigned]
            for value in node.all_input_nodes[1:]:
                root = self._root(value)
                users += [value, *(writer for writer, written in self._writes if self._root(written) is root)]
            self._stage_of[node] = max((self._stage_of.get(each, 0) for each in users), default=0)

    def check(self) -> None:
        """Raise UsageError if stages would need shared memory."""
        # Two ways in which a write in one stage is missed in another: the memory is a parameter or a buffer, of which
        # each stage has a copy, or several tensors that share it are sent on, which arrive as separate ones.
        for writer, value in self._writes:
            group = self._group(value)
            named = sorted(self._state[node] for node in group if node in self._state)
            stages = {self._stage_of[user] for node in group for user in node.users}
            if named and len(stages) > 1:
                raise UsageError(
                    f"{named[0]!r} is changed in place ({_place(writer)}) and used by the stages {sorted(stages)}: "
                    "each stage has its own copy and would not see the changes of another. Use it in one stage only"
                )
            crossing = [
                node
                for node in group
                if node not in self._state
                and max(map(self._stage_of.__getitem__, node.users), default=0) > self._stage_of.get(node, 0)
            ]
            if len(crossing) > 1:
                raise UsageError(
                    f"a value is changed in place ({_place(writer)}), and a view of it is sent to another stage, where "
                    "the two share no memory. Cut elsewhere, or create the view after the cut"
                )


def _effects(node: fx.Node) -> Iterator[tuple[fx.Node, bool, bool]]:
    """Yield each argument of an operation, True if it is written to, and True if a result shares memory with it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        if node.target is operator.getitem:
            yield from ((each, False, True) for each in node.all_input_nodes)
        return
    gives_views = any(each.alias_info is not None for each in schema.returns)
    for number, argument in enumerate(schema.arguments):
        value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        info = argument.alias_info
        is_written = (info is not None and info.is_write) or argument.name.startswith("running_")  # as in batch_norm
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, fx.Node):
                yield each, is_written, info is not None and gives_views


def _parts_of(node: fx.Node) -> Iterator[tuple[fx.GraphModule, list[fx.Node]]]:
    """Yield the inner graphs of an operation, as for another grad mode or autocast, and their arguments."""
    given: list[fx.Node] = []
    fx.node.map_arg(node.args, given.append)
    graphs = [each for each in given if each.op == "get_attr"]
    for each in graphs:
        assert node.graph.owning_module is not None
        part = node.graph.owning_module.get_submodule(str(each.target))
        assert isinstance(part, fx.GraphModule)
        yield part, given[given.index(graphs[-1]) + 1 :]


def _place(node: fx.Node) -> str:
    """Return the line of the user's program that an operation comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or str(node.target)).splitlines()]
    return lines[-1].rstrip(",")
