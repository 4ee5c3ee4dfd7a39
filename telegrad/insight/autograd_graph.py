"""The autograd graph of a context, across all workers that take part in it.

Edges point forward, in the direction of the values; gradients go backward.
"""

import json
import os
import pathlib
import shutil
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad.errors import CallTimeout, PeerError, UnknownWorker, UsageError
from telegrad.ext.calls import Future, folded, known_as, user_name
from telegrad.ext.feedback import checks, safe
from telegrad.ext.graphs import Inside, Origin, RecvNode, Send, check_context_id, edge_of
from telegrad.ext.host import instances, replacing
from telegrad.ext.workers import current
from telegrad.rpc import RRef, rpc_async

PATIENCE = 30.0  # seconds for a worker to answer
SHAPES = 3  # maximum number of shapes shown for one node
MOST = 2000  # maximum number of nodes shown for one worker

OPERATION, LEAF, ROOT, SEND, RECEIVE = "operation", "leaf", "root", "send", "receive"
COLOURS = {OPERATION: "#ffffff", LEAF: "#ddf4ff", ROOT: "#dafbe1", SEND: "#fff8c5", RECEIVE: "#fff8c5"}

Root = Tensor | RRef[Any]


class GraphNode(NamedTuple):
    kind: str
    name: str  # torch's name of the operation; of a leaf the parameter's name, of a send or receive the function
    detail: str = ""  # shapes; of a send or receive the other worker


class WorkerPart(NamedTuple):
    """The nodes of one worker. Edges refer to nodes by their indices in the list."""

    nodes: list[GraphNode]
    edges: list[tuple[int, int]]  # forward: from a node to one that uses its value
    sends: dict[int, int]  # the node of each sent message, by message number
    receives: dict[tuple[str, int], int]  # the node of each received message, by sender and number
    left_out: int = 0  # number of nodes omitted because of `MOST`


class SentTensor(NamedTuple):
    """An edge between two workers."""

    sender: str
    receiver: str
    number: int
    start: int  # the node at the sender
    end: int  # the node at the receiver
    name: str


@folded
class GradientGraph:
    """The nodes that a context recorded on each worker, and the messages between them, as returned by `graph`.

    A notebook displays it as a picture.

    Example:
        >>> with telegrad.autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 3)).sum()
        ...     telegrad.insight.graph(context_id, loss).save("graph.dot")
    """

    def __init__(self, context_id: int, parts: Mapping[str, WorkerPart], silent: Mapping[str, str]) -> None:
        self.context_id = context_id
        self.parts: dict[str, WorkerPart]
        self.messages: list[SentTensor]
        self.parts, self.messages = joined(parts)
        self.silent: dict[str, str] = dict(silent)  # workers that did not answer, and why

    def __str__(self) -> str:
        nodes = sum(len(part.nodes) for part in self.parts.values())
        counts = ((len(self.parts), "worker"), (nodes, "node"), (len(self.messages), "message"))
        told = ", ".join(f"{count:,} {what}{'' if count == 1 else 's'}" for count, what in counts)
        silent = "".join(f"; {worker} did not answer: {safe(why)}" for worker, why in self.silent.items())
        return f"context {self.context_id}: {told}{silent}"

    def __repr__(self) -> str:
        return f"<GradientGraph of {self}>"

    def dot(self) -> str:
        """Return the graph in the DOT language of Graphviz."""
        lines = [f"digraph {_quoted(str(self))} {{", '  node [shape=box, style=filled, fontname="sans-serif"];']
        for at, (worker, part) in enumerate(self.parts.items()):
            title = f"{worker} ({part.left_out:,} more nodes)" if part.left_out else worker
            lines += [f"  subgraph cluster_{at} {{", f"    label={_quoted(title)};"]
            for index, node in enumerate(part.nodes):
                text = _quoted("\n".join(filter(None, _words(node))))
                lines.append(f'    n{at}_{index} [label={text}, fillcolor="{COLOURS[node.kind]}"];')
            lines += [*(f"    n{at}_{start} -> n{at}_{end};" for start, end in part.edges), "  }"]
        place = {worker: at for at, worker in enumerate(self.parts)}
        for each in self.messages:
            start, end = f"n{place[each.sender]}_{each.start}", f"n{place[each.receiver]}_{each.end}"
            name = _quoted(f"{each.name} ({each.sender}, message {each.number})")
            lines.append(f"  {start} -> {end} [label={name}, style=dashed];")
        return "\n".join([*lines, "}", ""])

    def svg(self) -> str:
        """Return the graph as SVG, drawn by Graphviz.

        Raises:
            UsageError: Graphviz is not installed.
        """
        program = shutil.which("dot")
        if program is None:
            raise UsageError("a picture needs Graphviz: apt-get install graphviz, or save the graph as .dot")
        text = subprocess.run([program, "-Tsvg"], input=self.dot().encode(), stdout=subprocess.PIPE, check=True)
        return text.stdout[text.stdout.index(b"<svg") :].decode()

    def _repr_svg_(self) -> str | None:
        return self.svg() if shutil.which("dot") else None  # then a notebook shows the text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph to a file.

        Args:
            path: its suffix chooses the format: .svg (drawn by Graphviz) or .dot.

        Raises:
            UsageError: it has another suffix, or .svg and Graphviz is not installed.
        """
        path = pathlib.Path(checks.path("path", path))
        writers = {".svg": self.svg, ".dot": self.dot, ".gv": self.dot}
        if path.suffix not in writers:
            raise UsageError(
                f"a picture is saved as .svg or .dot, not as {path.suffix or 'a file without a suffix'}: {path}"
            )
        text = writers[path.suffix]()
        with replacing(path) as file:
            file.write(text.encode())


def _words(node: GraphNode) -> tuple[str, str]:
    if node.kind == SEND:
        return f"send {node.name}", f"to {node.detail}"
    if node.kind == RECEIVE:
        return f"receive {node.name}".strip(), f"from {node.detail}"
    return node.name, node.detail


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def joined(parts: Mapping[str, WorkerPart]) -> tuple[dict[str, WorkerPart], list[SentTensor]]:
    """Return the parts, with the texts of other processes sanitized, and the messages between them. If the receiver
    does not know a message's node, it is added: autograd finds a `RecvNode` only from tensors computed from it."""
    found = {
        name: part._replace(
            nodes=[GraphNode(node.kind, safe(node.name), safe(node.detail, lines=True)) for node in part.nodes],
            receives={**part.receives},
        )
        for name, part in parts.items()
    }
    messages = []
    for sender, part in [*found.items()]:
        for number, start in part.sends.items():
            node = part.nodes[start]
            receiver = found.setdefault(node.detail, WorkerPart([], [], {}, {}))
            # The node is replaced if the receiver knows it, because only the sender knows the name of the function.
            # Otherwise `end` is the length of the list, and the assignment to the slice appends the node.
            end = receiver.receives.setdefault((sender, number), len(receiver.nodes))
            receiver.nodes[end : end + 1] = [GraphNode(RECEIVE, node.name, sender)]
            messages.append(SentTensor(sender, node.detail, number, start, end, node.name))
    return found, messages


def limited(part: WorkerPart, most: int = MOST) -> WorkerPart:
    """Return the part with at most that many nodes; the last operations and leaves are dropped."""
    loose = [index for index, node in enumerate(part.nodes) if node.kind in (OPERATION, LEAF)]
    gone = set(loose[-(len(part.nodes) - most) :]) if len(part.nodes) > most else set[int]()
    kept = [index for index in range(len(part.nodes)) if index not in gone]
    place = {index: number for number, index in enumerate(kept)}
    return WorkerPart(
        [part.nodes[index] for index in kept],
        [(place[start], place[end]) for start, end in part.edges if start in place and end in place],
        {number: place[index] for number, index in part.sends.items()},
        {message: place[index] for message, index in part.receives.items()},
        len(gone),
    )


@folded
def graph(context_id: int, roots: Root | Sequence[Root] = ()) -> GradientGraph:
    """Return the autograd graph of a context, across all workers that take part in it.

    A worker with more than 2,000 nodes omits the operations and leaves that are farthest from sends and roots.

    Args:
        context_id: the id from `with context() as context_id`.
        roots: tensors of this worker, or references to tensors of others; their history is shown in addition to that
            of sent tensors.

    Returns:
        A `GradientGraph`.

    Raises:
        ContextEnded: this worker has no such context.
        UsageError: a root is neither a tensor nor a reference.

    Example:
        >>> with telegrad.autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 3)).sum()
        ...     print(telegrad.insight.graph(context_id, loss).dot()[:7])
        digraph
    """
    here = current.here()
    check_context_id(context_id)
    here.conductor.contexts.find(context_id)
    elsewhere: dict[str, list[Root]] = {}  # roots by worker
    for root in roots if isinstance(roots, (list, tuple)) else [roots]:
        if not isinstance(root, (Tensor, RRef)):
            raise UsageError(f"roots must be tensors or references to tensors, not {checks.short_repr(root)}")
        owner = root.owner_name() if isinstance(root, RRef) else here.agent.name
        elsewhere.setdefault(owner, []).append(root)
    parts: dict[str, WorkerPart] = {}
    silent: dict[str, str] = {}
    parts[here.agent.name], known = look(context_id, elsewhere.pop(here.agent.name, []))
    ahead = known | set(elsewhere)
    with Inside(None):  # these calls must not be recorded in the context
        # A worker may know only some of the participants. So they are found in rounds: each answer may name further
        # ones.
        while wave := sorted(ahead - parts.keys() - silent.keys()):
            calls: dict[str, Future[tuple[WorkerPart, set[str]]]] = {}
            for name in wave:
                try:
                    calls[name] = rpc_async(name, look, (context_id, elsewhere.get(name, [])), timeout=PATIENCE)
                except (PeerError, UnknownWorker) as error:
                    silent[name] = str(error).partition("\n")[0]
            for name, call in calls.items():
                try:
                    parts[name], known = call.wait()
                    ahead |= known
                except (PeerError, CallTimeout) as error:
                    silent[name] = str(error).partition("\n")[0]
    return GradientGraph(context_id, parts, silent)


@known_as("telegrad.insight.graph")
def look(context_id: int, roots: Sequence[Root]) -> tuple[WorkerPart, set[str]]:
    """Return this worker's part of a context, and the participants that it knows. Called remotely."""
    context = current.conductor().contexts.get(context_id)
    walk = GraphWalk()
    for root in roots:
        walk.root(root.local_value() if isinstance(root, RRef) else root)
    if context is not None:
        for number, send in context.sends.items():
            walk.send(number, send)
    known = {who.name for who in context.known} if context is not None else set()
    return limited(walk.part()), known


class GraphWalk:
    """Walks the graph of one worker backward, from sends and roots to leaves and receives."""

    def __init__(self) -> None:
        self._nodes: list[GraphNode] = []
        self._edges: dict[tuple[int, int], None] = {}
        self._sends: dict[int, int] = {}
        self._receives: dict[tuple[str, int], int] = {}
        # Of torch's nodes; the keys keep them alive, or else torch would make new objects for the same nodes.
        self._places: dict[Any, int] = {}
        self._ahead: deque[Any] = deque()
        self._names: dict[int, str] | None = None

    def root(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise UsageError(f"a root must be a tensor or a reference to one, not {type(value).__name__}")
        end = self._add(GraphNode(ROOT, "root", _shape(value)))
        if value.requires_grad:
            self._lead(edge_of(value).node, end)

    def send(self, number: int, send: Send) -> None:
        end = self._sends[number] = self._add(GraphNode(SEND, _short(user_name(send.what)), send.to))
        for edge in send.edges:
            self._lead(edge_of(edge).node if isinstance(edge, Tensor) else edge.node, end)

    def part(self) -> WorkerPart:
        """Walk back to all nodes that the added ones depend on; return them all."""
        while self._ahead:
            node = self._ahead.popleft()
            # A receive is the limit of this worker's part: the nodes before it are the sender's.
            for before, _ in node.next_functions if _origin(node) is None else ():
                if before is not None:
                    self._lead(before, self._places[node])
        return WorkerPart(self._nodes, list(self._edges), self._sends, self._receives)

    def _add(self, node: GraphNode) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _lead(self, node: Any, end: int) -> None:
        """Add an edge that starts at a node of torch."""
        if node not in self._places:
            place = self._places[node] = self._add(self._described(node))
            self._ahead.append(node)
            origin = _origin(node)
            if origin is not None:
                self._receives[origin.sender.name, origin.number] = place
        self._edges[self._places[node], end] = None

    def _described(self, node: Any) -> GraphNode:
        origin = _origin(node)
        if origin is not None:
            return GraphNode(RECEIVE, "", origin.sender.name)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            if self._names is None:
                self._names = _names_of_parameters()
            return GraphNode(LEAF, self._names.get(id(variable), "leaf"), _shape(variable))
        shapes = ["nested" if each.is_nested_tensor else _by(each.shape) for each in node._input_metadata]
        shown = ", ".join(shapes[:SHAPES]) + ("" if len(shapes) <= SHAPES else ", …")
        return GraphNode(OPERATION, node.name().rpartition("::")[2], shown)


def _origin(node: Any) -> Origin | None:
    """Return the message that brought the tensor of a node; None for other nodes."""
    return getattr(node, "origin", None) if isinstance(node, RecvNode) else None


def _names_of_parameters() -> dict[int, str]:
    """Return the names of parameters by id: the class of the outermost module, and the name in it."""
    modules = instances(nn.Module)
    inner = {id(part) for module in modules for part in _held(module, "_modules").values()}
    names: dict[int, str] = {}
    # A module that contains itself counts as inner.
    for module in sorted(modules, key=lambda module: id(module) in inner):
        _name_parameters(module, type(module).__name__, names, set())
    return names


def _name_parameters(module: nn.Module, prefix: str, names: dict[int, str], seen: set[int]) -> None:
    seen.add(id(module))
    for name, parameter in _held(module, "_parameters").items():
        names.setdefault(id(parameter), f"{prefix}.{name}")
    for name, part in _held(module, "_modules").items():
        if part is not None and id(part) not in seen:
            _name_parameters(part, f"{prefix}.{name}", names, seen)


def _held(module: nn.Module, what: str) -> Mapping[str, Any]:
    """Return an attribute from `vars`, because methods may be overridden by the program or by a remote module."""
    held: Mapping[str, Any] = vars(module).get(what) or {}  # it may be partly constructed
    return held


def _shape(tensor: Tensor) -> str:
    kind = "" if tensor.dtype == torch.float32 else f" {str(tensor.dtype).removeprefix('torch.')}"
    return ("nested" if tensor.is_nested else _by(tensor.shape)) + kind


def _by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def _short(name: str) -> str:
    """Return a function's name without its modules, but with its class."""
    before, _, last = name.rpartition(".")
    owner = before.rpartition(".")[2]
    return f"{owner}.{last}" if owner[:1].isupper() else last
