"""Pictures of gradients: the autograd graph of a context, across all workers that take part in it."""

from __future__ import annotations

import os
import pathlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from telegrad import checks
from telegrad.agent.futures import Future
from telegrad.agent.naming import user_name
from telegrad.autograd.api import check_context_id
from telegrad.autograd.edges import edge_of
from telegrad.autograd.record import Inside, Origin, RecvNode, Send
from telegrad.errors import CallTimeout, PeerError, UnknownWorker, UsageError
from telegrad.insight import drawing, graphs
from telegrad.insight.graphs import LEAF, OPERATION, RECEIVE, ROOT, SEND, Node, Part
from telegrad.instances import instances
from telegrad.private_files import replacing
from telegrad.rpc import RRef, current, rpc_async
from telegrad.safe_text import safe

PATIENCE = 30.0  # seconds that a worker has to look at its graph
SHAPES = 3  # of a node that has more outputs, so many are told

Root = Tensor | RRef[Any]


class GradientGraph:
    """What was recorded in a context: of each worker its nodes, and the messages between them; from `graph`.

    Printed, it tells of each worker in words; a notebook shows a picture.

    Example:
        >>> with telegrad.autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 3)).sum()
        ...     telegrad.insight.graph(context_id, loss).save("graph.svg")
    """

    def __init__(self, context_id: int, parts: Mapping[str, Part], silent: Mapping[str, str]) -> None:
        self.context_id = context_id
        self.parts: dict[str, Part]
        self.messages: list[graphs.Message]
        self.parts, self.messages = graphs.completed(parts)
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
        """Text for Graphviz."""
        return drawing.dot(str(self), self.parts, self.messages)

    def svg(self) -> str:
        """A picture of it."""
        workers = "; ".join(f"{name}: {_in_words(part)}" for name, part in self.parts.items())
        return drawing.svg(f"Autograd graph of {self}", workers, self.parts, self.messages)

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file.

        Args:
            path: its suffix says as what: .svg or .dot.

        Raises:
            UsageError: it has another suffix.
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


def _in_words(part: Part) -> str:
    leaves = [f"{node.name} {node.detail}".strip() for node in part.nodes if node.kind == LEAF]
    operations = [node.name for node in part.nodes if node.kind not in (LEAF, SEND, RECEIVE, ROOT)]
    return f"{len(part.sends)} sent, {len(part.receives)} received; {', '.join([*operations, *leaves])}"


def graph(context_id: int, roots: Root | Sequence[Root] = ()) -> GradientGraph:
    """The autograd graph of a context, across all workers that take part in it.

    A worker with more than 2,000 nodes folds chains of operations, then leaves out what is farthest.

    Args:
        context_id: what `with context() as context_id` gives.
        roots: tensors of this worker, or references to others, whose past is wanted, besides that of what was sent.

    Returns:
        A `GradientGraph`.

    Raises:
        ContextEnded: there is no such context here.
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
    own, elsewhere = _roots(here.agent.name, roots)
    parts: dict[str, Part] = {}
    silent: dict[str, str] = {}
    parts[here.agent.name], known = look(context_id, own)
    ahead = known | set(elsewhere)
    with Inside(None):  # these calls are no part of it
        while wave := sorted(ahead - parts.keys() - silent.keys()):
            for name, found in _asked(wave, context_id, elsewhere).items():
                if isinstance(found, str):
                    silent[name] = found
                else:
                    parts[name], known = found
                    ahead |= known
    return GradientGraph(context_id, parts, silent)


def _roots(here: str, roots: Root | Sequence[Root]) -> tuple[list[Root], dict[str, list[Root]]]:
    """Those of this worker, and those of others by worker."""
    by_worker: dict[str, list[Root]] = {}
    for root in roots if isinstance(roots, (list, tuple)) else [roots]:
        if not isinstance(root, (Tensor, RRef)):
            raise UsageError(f"roots are tensors or references to such, not {checks.shown(root)}")
        by_worker.setdefault(root.owner_name() if isinstance(root, RRef) else here, []).append(root)
    return by_worker.pop(here, []), by_worker


def _asked(
    workers: Sequence[str], context_id: int, roots: Mapping[str, list[Root]]
) -> dict[str, tuple[Part, set[str]] | str]:
    """What workers have of a context, or why they do not say."""
    found: dict[str, tuple[Part, set[str]] | str] = {}
    calls: dict[str, Future[tuple[Part, set[str]]]] = {}
    for name in workers:
        try:
            calls[name] = rpc_async(name, look, (context_id, roots.get(name, [])), timeout=PATIENCE)
        except (PeerError, UnknownWorker) as error:
            found[name] = _first_line(error)
    for name, call in calls.items():
        try:
            found[name] = call.wait()
        except (PeerError, CallTimeout) as error:
            found[name] = _first_line(error)
    return found


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# What each worker does


def look(context_id: int, roots: Sequence[Root]) -> tuple[Part, set[str]]:
    """What this worker has of a context, and which others it knows to take part; for remote calls."""
    context = current.conductor().contexts.get(context_id)
    walk = _Walk()
    for root in roots:
        walk.root(root.local_value() if isinstance(root, RRef) else root)
    if context is not None:
        for number, send in context.sends.items():
            walk.send(number, send)
    walk.go()
    known = {who.name for who in context.known} if context is not None else set()
    return graphs.folded(walk.part()), known


class _Walk:
    """Through the graph of one worker, from what it has sent and from roots, as far as what it has received."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._edges: dict[tuple[int, int], None] = {}
        self._sends: dict[int, int] = {}
        self._receives: dict[tuple[str, int], int] = {}
        self._places: dict[Any, int] = {}  # of torch's nodes; that they are kept here keeps them the same objects
        self._ahead: deque[Any] = deque()
        self._names: dict[int, str] | None = None

    def root(self, value: Any) -> None:
        """A tensor that may be the root of a pass."""
        if not isinstance(value, Tensor):
            raise UsageError(f"a root is a tensor or a reference to one, not {type(value).__name__}")
        end = self._add(Node(ROOT, "root", _shape(value)))
        if value.requires_grad:
            self._lead(edge_of(value).node, end)

    def send(self, number: int, send: Send) -> None:
        """A message that took tensors away."""
        end = self._sends[number] = self._add(Node(SEND, _short(user_name(send.what)), send.to))
        for edge in send.edges:
            self._lead(edge_of(edge).node if isinstance(edge, Tensor) else edge.node, end)

    def go(self) -> None:
        """To all that has led to these."""
        while self._ahead:
            node = self._ahead.popleft()
            for before, _ in node.next_functions if _origin(node) is None else ():
                if before is not None:
                    self._lead(before, self._places[node])

    def part(self) -> Part:
        return Part(self._nodes, list(self._edges), self._sends, self._receives)

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _lead(self, node: Any, end: int) -> None:
        """An edge from a node of torch's."""
        if node not in self._places:
            place = self._places[node] = self._add(self._described(node))
            self._ahead.append(node)
            origin = _origin(node)
            if origin is not None:
                self._receives[origin.sender.name, origin.number] = place
        self._edges[self._places[node], end] = None

    def _described(self, node: Any) -> Node:
        origin = _origin(node)
        if origin is not None:
            return Node(RECEIVE, "", origin.sender.name)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            if self._names is None:
                self._names = _names_of_parameters()
            return Node(LEAF, self._names.get(id(variable), "leaf"), _shape(variable))
        return Node(OPERATION, node.name().rpartition("::")[2], _shapes(node))


def _origin(node: Any) -> Origin | None:
    """Where what came with a node came from, if it did."""
    return getattr(node, "origin", None) if isinstance(node, RecvNode) else None


def _names_of_parameters() -> dict[int, str]:
    """Of all modules of this process, by the ids of the parameters: the name in the outermost module, and its class."""
    modules = instances(nn.Module)
    inner = {id(part) for module in modules for part in _held(module, "_modules").values()}
    names: dict[int, str] = {}
    for module in sorted(modules, key=lambda module: id(module) in inner):  # one that holds itself is inner, too
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
    """Its parts, without its methods, which may be a program's own, or those of a remote module."""
    held: Mapping[str, Any] = vars(module).get(what) or {}  # it may be half built
    return held


def _shape(tensor: Tensor) -> str:
    kind = "" if tensor.dtype == torch.float32 else f" {str(tensor.dtype).removeprefix('torch.')}"
    return ("nested" if tensor.is_nested else _by(tensor.shape)) + kind


def _shapes(node: Any) -> str:
    shapes = ["nested" if each.is_nested_tensor else _by(each.shape) for each in node._input_metadata]
    return ", ".join(shapes[:SHAPES]) + ("" if len(shapes) <= SHAPES else ", …")


def _by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def _short(name: str) -> str:
    """A function's name without its modules, but with its class."""
    before, _, last = name.rpartition(".")
    owner = before.rpartition(".")[2]
    return f"{owner}.{last}" if owner[:1].isupper() else last
