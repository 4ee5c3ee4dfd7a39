"""One worker's part of a pass: the schedule decides which nodes of the graph may run, and torch's engine runs them.

Torch's engine runs a graph in one call, from all its roots to all its leaves, into `.grad`. Here gradients enter at
several times, leaves take theirs into the context, and some nodes end at other workers. So each batch of tasks is one
step: gradients are entered (`_take_in`, `_enter`), the schedule returns the nodes that are complete (`GraphStep`), and
its acts run one after the other. An act is a call of the engine from some edges to others, as
`torch.autograd.grad` makes it, or a single node that runs by hand. Gradients for nodes of later acts wait in
`_pending`.

The graph needs nothing but nodes and edges for that, with these additions:

- The edges of a `Send` are entries. Leaves that take their gradient in parts are kept as tensors, and bypass the graph.
- A `Recv` is the end of the graph. The engine calls `Recv.backward`, and that calls `ship`, as soon as the
  node is ready, while the rest of the call still runs.
- None as a pending gradient means that the pass has reached an output without a gradient (`WITHOUT` on the wire). The
  engine cannot start there, so such nodes run by hand. An output without an entry was not reached.
- The engine calls the hooks of a tensor whose gradient it returns. If the node then runs by hand, its hooks must not be
  called again: it is in `_told`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import attrgetter
from sys import getrefcount
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad._core.calls import profiling
from telegrad._core.membership.members import Identity
from telegrad._core.memory.device_streams import Streams
from telegrad.autograd import guard, node_calls
from telegrad.autograd.contexts import AutogradContext
from telegrad.autograd.gradients import ShardedPart, averaged, replicated, sharded_modules, total, unsharded_ids
from telegrad.autograd.guard import Capture, CaptureKinds, CheckpointNode
from telegrad.autograd.passes import WITHOUT, PassSpec
from telegrad.autograd.schedule import ALONE, LEAF, PLAIN, RECV, EngineCall, GraphSchedule, GraphStep, Kinds, Node
from telegrad.autograd.send_recv import UNKNOWN, Origin, Outbox, RecvNode, edge_of, expected_at, run_backward
from telegrad.errors import UsageError

SEND_EVENT = "torch::distributed::autograd::SendRpcBackward"  # the event for arriving gradients in profiles
ROOTS = 0  # the entry of the roots; other entries are message numbers
_origin_of = attrgetter("origin")  # of a Recv node

LeafNode: type = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)


def _has_hooks(leaf: Tensor, node: Node | None = None) -> bool:
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or not node_calls.hooked:
        return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
    node = edge_of(leaf).node if node is None else node
    return bool(node_calls.hooks_before_leaf(node) or node_calls.hooks_behind_leaf(node))


def _kind_of_leaf(node: Node, averaged: AbstractSet[int] = frozenset()) -> int:
    """Return PLAIN if the leaf may take its gradient in parts: it has no hooks, and its id is not in `averaged`."""
    return LEAF if id(node.variable) in averaged or _has_hooks(node.variable, node) else PLAIN


KINDS: dict[type, Callable[[Node], int]] = {
    LeafNode: _kind_of_leaf,
    RecvNode: lambda node: RECV,
    CheckpointNode: lambda node: ALONE,
}


# The reference count of a gradient in the loop over the engine's results, if there is no other reference to it. There
# may be others: its function may have kept it, or given it to several leaves. The loop calls `getrefcount` itself: a
# Python function in between would count one more while torch compiles, and permanently after a failed compilation
# (torch 2.13).
UNSHARED = next(getrefcount(gradient) for _, gradient in zip([None], (torch.empty(0, device="cpu"),), strict=False))


class EngineRunner:
    """The graph of one worker in one pass, run by torch's engine. Only one thread at a time may call it.

    The runner is created for the first task: by then, everything that the pass can reach has been recorded.
    """

    def __init__(
        self,
        context: AutogradContext,
        spec: PassSpec,
        roots: Sequence[Tensor],
        outbox: Outbox,
        streams: Streams,
        capture: Capture | None = None,
    ) -> None:
        """`roots` are those of this worker."""
        self._context = context
        self._streams = streams
        self._spec = spec
        self._outbox = outbox
        self._capture = capture
        self._seeds = list(map(torch.ones_like, roots)) if capture is None else capture.seeds
        self._replicated = set() if spec.captures else replicated()
        # `guard` refuses sharded modules in other passes
        modules = [] if spec.captures or spec.create else sharded_modules()
        self._unsharded = unsharded_ids(modules) if modules else set()
        self._averaged = self._replicated | self._unsharded  # the ids of leaves whose gradients all ranks average
        self._sends = context.sends  # a copy: later sends take no part in this pass
        # The edges at which the gradients of each entry come in. A leaf that may take its gradient in parts has none.
        self._edges: dict[int, list[GradientEdge | Tensor]] = {}
        nodes: dict[int, list[Node]] = {}  # behind these edges
        sources: dict[int, Iterable[Any]] = {ROOTS: map(edge_of, roots)} if roots else {}
        for number, send in self._sends.items():
            sources[number] = send.edges
        for entry, edges in sources.items():
            self._edges[entry] = own = []
            nodes[entry] = behind = []
            for edge in edges:
                if type(edge) is not GradientEdge:
                    if not (spec.captures or id(edge) in self._averaged or _has_hooks(edge)):
                        own.append(edge)
                        continue
                    edge = edge_of(edge)
                own.append(edge)
                behind.append(edge.node)
        edges_only: Any = self._edges  # with captures there are no leaves
        self._capture_kinds = CaptureKinds(context, edges_only, capture) if spec.captures else None
        # A bound method of the runner would make a reference cycle, and keep the graph alive until garbage collection.
        kinds: Kinds = {**KINDS, LeafNode: partial(_kind_of_leaf, averaged=self._averaged)} if self._averaged else KINDS
        kinds = self._capture_kinds or kinds
        self._sharded = ShardedPart(modules, nodes) if modules else None
        self._schedule = GraphSchedule(nodes, kinds)
        self._marked: set[int] = set()  # sends that can still receive
        self._buried = False  # only marked sends may still receive, on all workers
        # Unused gradients that came to nodes, by the index of the output; None: there is no gradient.
        self._pending: dict[Node, dict[int, Tensor | None]] = {}
        self._lacking = False  # a node got no gradient at all, so the engine cannot start there
        self._told: set[Node] = set()  # nodes whose hooks were called with the pending gradients
        self._unreduced: dict[Node, Tensor] = {}  # gradients of replicated leaves
        self._entered: Sequence[tuple[Any, ...]] = []  # the places at which the current act started
        self._reached: Mapping[Origin, set[int]] | None = None  # from there; None until a Recv needs it
        # `ship` changes the following fields, and the engine's threads for several devices may call it concurrently. A
        # wrong count then only sends gradients alone, or at the end of the step. The other fields change by single set
        # operations.
        # for senders of several messages: how many of these still get gradients in this step
        self._coming: dict[Identity, int] = {}
        self._unshipped: set[Origin] = set()
        self._received_on: set[torch.Stream] = set()  # the streams on which the Recvs of the current step ran

    # Called by the protocol

    def start(self) -> None:
        """Run from the roots. On a worker that has roots, this is the first task."""
        self._take_in([(ROOTS, self._seeds)])
        self._run()

    def arrive(self, gradients: Iterable[tuple[int, Sequence[Tensor | None]]]) -> None:
        """Take gradients of sent tensors, and run the nodes that can run."""
        if profiling.enabled():
            profiling.recorded(SEND_EVENT, lambda: self._take_in(gradients))
        else:
            self._take_in(gradients)
        self._run()

    def _take_in(self, gradients: Iterable[tuple[int, Sequence[Tensor | None]]]) -> None:
        schedule = self._schedule
        for entry, parts in gradients:
            if entry not in schedule.open:
                raise UsageError(
                    f"tensors sent since the backward pass of context {self._context.id} began here take part in it: a "
                    "call has changed a root in place meanwhile. Wait for such calls before the pass"
                )
            shared = len(parts) > 1 and len({*map(id, parts)}) < len(parts)  # one tensor may be sent for several
            for edge, gradient in zip(self._edges[entry], parts, strict=False):
                if gradient is None:
                    continue
                if gradient is WITHOUT:
                    if not isinstance(edge, Tensor):
                        self._enter(edge.node, edge.output_nr, None)
                    continue
                if self._streams.used:  # it may have come to another device than the tensor's
                    expected = edge if isinstance(edge, Tensor) else expected_at(edge.node, edge.output_nr)
                    gradient = gradient.to(expected.device)
                if isinstance(edge, Tensor):
                    self._context.gradients.add(edge, gradient, self._spec.create, shared)
                else:
                    self._enter(edge.node, edge.output_nr, gradient)
            schedule.close(entry)

    def mark(self, sends: Sequence[int]) -> Mapping[str, list[int]]:
        """Return the sends of other workers that these sends lead to. Without sends, start at the waiting nodes."""
        starts = list(self._pending)
        if sends:
            starts = [edge.node for send in sends for edge in self._edges[send] if type(edge) is GradientEdge]
        self._marked.update(sends)
        found: dict[str, list[int]] = {}
        for node in self._schedule.mark(starts):
            found.setdefault(node.origin.sender.name, []).append(node.origin.number)
        return found

    def bury(self) -> None:
        """Run the nodes that waited for sends that were not marked: these will receive nothing."""
        self._buried = True
        schedule = self._schedule
        for entry in [entry for entry in schedule.open if entry not in self._marked]:
            schedule.close(entry)
        self._run()

    @property
    def starved(self) -> bool:
        """Return True if gradients wait for others."""
        return bool(self._pending or self._unreduced)

    @property
    def expects(self) -> bool:
        """Return True if gradients may come to a sent tensor or to a root, and from there to a leaf."""
        return bool(self._schedule.open) and not self._spec.captures

    @property
    def waiting(self) -> Iterator[str]:
        """Describe the sends that have received nothing."""
        return (str(self._sends[entry]) for entry in self._schedule.open)

    def _reduce(self, schedule: GraphSchedule) -> None:
        """Average all gradients of replicated leaves in one call, once none of them can change any more."""
        leaves = [node for node, kind in schedule.kind.items() if kind == LEAF]
        if all(schedule.settled(leaf) for leaf in leaves if id(leaf.variable) in self._replicated):
            unreduced, self._unreduced = self._unreduced, {}
            for node, gradient in averaged(unreduced).items():
                self._context.gradients.add(node.variable, gradient, self._spec.create)

    # Running

    def _run(self) -> None:
        if not self._schedule.changed:
            return
        # A hook on this thread may begin a pass of another context and wait for it, which runs here within this one. So
        # the mark of the thread is only removed by the outermost one.
        schedule, part, self._context.running = self._schedule, self._sharded, self
        thread = get_ident()
        outer = thread in guard.running
        guard.running.add(thread)
        try:
            if part is None:
                self._run_step()
            else:
                with part.running(self._context.gradients):
                    self._run_step()
                    part.finish(schedule.settled)
            if self._unreduced:
                self._reduce(schedule)
        finally:
            self._context.running = None
            if not outer:
                guard.running.discard(thread)

    def _run_step(self) -> None:
        step = self._schedule.step(self._pending, self._lacking)
        # All Recvs of the step are checked before any node runs. A graph of another context, whose gradient the sender
        # would not know, must not be run in part.
        recvs = self._recvs(step)
        self._unshipped = origins = set(map(_origin_of, recvs))
        for origin in origins:
            if origin.number == UNKNOWN:
                raise origin.refusal()
            if origin.context is not self._context:
                raise UsageError(
                    f"the graph of context {self._context.id} leads to tensors that came from worker "
                    f"{origin.sender.name!r} in another context, {origin.context.id}. Detach tensors that outlive "
                    "their context"
                )
        self._coming = Counter([origin.sender for origin in origins]) if len(origins) > 1 else {}
        for act in step.acts:
            if type(act) is not EngineCall:
                self._run_by_hand(act)
            elif self._lacking and any(map(self._lacks, act.nodes)):
                for node in act.nodes:
                    self._run_by_hand(node)
            else:
                self._run_engine(act)
        # A sender that still waits is told that no gradient comes. After the declaration of the dead, only marked sends
        # are open at their workers, and a message for any other would be an error there.
        for node in recvs if self._unshipped else ():
            if node.origin in self._unshipped and (not self._buried or node in self._schedule.marked):
                self._ship(node.origin, ())
        self._outbox.flush()

    def _recvs(self, step: GraphStep) -> Sequence[Node]:
        """Return the Recv nodes that a step runs or does not reach."""
        acts = step.acts
        if len(acts) == 1 and type(acts[0]) is EngineCall and not step.unreached:
            return acts[0].recvs
        kinds = self._schedule.kind
        found = [each for act in acts for each in (act.recvs if type(act) is EngineCall else [act])]
        return [*(node for node in found if kinds.get(node) == RECV), *step.unreached]

    def ship(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients that came to a Recv. The engine calls this on any of its threads."""
        # The Recv is not a part of the current step if a hook, or another thread, calls the engine itself meanwhile.
        # Its gradient is not one of this pass, and must not be sent as such.
        if origin not in self._unshipped:
            raise origin.refusal()
        if self._streams.used:
            self._received_on.update(self._streams.current())
        for gradient in gradients:
            if gradient is None:  # for a tensor that the pass has reached, it is WITHOUT
                if (found := self._reached) is None:
                    found = self._reached = outputs_reached(self._entered)
                reached = found.get(origin, ())
                gradients = [
                    WITHOUT if each is None and number in reached else each for number, each in enumerate(gradients)
                ]
                break
        self._ship(origin, gradients)

    def _ship(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        self._unshipped.discard(origin)
        left = 0
        if self._coming:
            left = self._coming[origin.sender] = self._coming.get(origin.sender, 1) - 1
        self._outbox.add(origin.sender, origin.number, gradients, left > 0, not self._unshipped)

    def _lacks(self, node: Node) -> bool:
        """Return True if the pass has reached a node without any gradient."""
        pending = self._pending.get(node)
        return pending is not None and all(gradient is None for gradient in pending.values())

    def _run_engine(self, call: EngineCall) -> None:
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        without: list[GradientEdge] = []
        # Gradients that earlier acts left at fed nodes enter as well, so that their hooks see the whole gradient once.
        for node in (*call.nodes, *call.fed) if call.fed else call.nodes:
            for number, entering in self._pending.pop(node, {}).items():
                if entering is None:
                    without.append(GradientEdge(node, number))
                else:
                    roots.append(GradientEdge(node, number))
                    gradients.append(entering)
        if not roots:
            return
        self._entered = [*roots, *without] if without else roots  # `ship` follows the graph from here
        self._reached = None
        if self._capture_kinds is None:
            leaves = [GradientEdge(leaf, 0) for leaf in call.leaves] if call.leaves else []
        else:
            leaves = self._capture_kinds.wanted([*call.leaves, *call.recvs])
        fed = [GradientEdge(node, number) for node in call.fed for number in range(len(node._input_metadata))]
        wanted: list[Any] = [*leaves, *[node.anchor for node in call.recvs], *fed]
        # The engine runs only nodes that lead to one of these edges. The anchor of a Recv is wanted for that alone.
        if not wanted:
            return
        given = run_backward(roots, gradients, wanted, self._spec.retain, self._spec.create)
        if self._streams.used:
            self._streams.keep(given)  # nodes run on the streams of the forward pass
            # hooks may have made tensors there; the engine synchronizes all other nodes
            self._streams.follow(self._received_on)
            self._received_on.clear()
        for leaf, gradient in zip(leaves, given, strict=False):
            if gradient is not None:
                shared = getrefcount(gradient) > UNSHARED
                self._accumulate(leaf.node, gradient, shared, leaf.output_nr)
        if fed:
            self._feed(call, fed, given[len(given) - len(fed) :])

    def _feed(self, call: EngineCall, edges: Sequence[GradientEdge], given: Sequence[Tensor | None]) -> None:
        """Pass the results of an engine call, after hooks, to nodes that run by hand."""
        # The engine returns None both for an output that the call has reached without a gradient and for one that it
        # has not reached. So all outputs behind the nodes of the call are entered with None first, as reached.
        self._told.update(call.fed)
        behind = (edge for node in call.nodes for edge in node.next_functions)
        for fed, number, *_ in [*self._entered, *behind]:
            if fed in self._told:
                self._enter(fed, number, None)
        for edge, gradient in zip(edges, given, strict=True):
            if gradient is not None:
                self._enter(edge.node, edge.output_nr, gradient)

    def _run_by_hand(self, node: Node) -> None:
        pending = self._pending.pop(node, None)
        if pending is None:
            return
        self._entered = [(node, number) for number in pending]
        self._reached = None
        fire = node not in self._told
        kind = self._schedule.kind.get(node)
        if self._capture is not None and self._capture_kinds is not None:
            if kind == LEAF and fire:
                pending = node_calls.call_tensor_hooks(node, pending, self._spec)
            for edge in self._capture_kinds.wanted([node]):
                self._capture.take((node, edge.output_nr), pending.get(edge.output_nr))
            if kind == LEAF:
                return
        given = node_calls.run(node, pending, fire, self._spec, self._accumulate, self._streams)
        if kind == RECV:
            return
        for (following, number), gradient in zip(node.next_functions, given, strict=False):
            if following is not None:
                self._enter(following, number, gradient)

    def _enter(self, node: Node, number: int, gradient: Tensor | None) -> None:
        """Record that the pass has reached a node's output, with its gradient. A leaf takes the complete gradient."""
        if self._schedule.kind.get(node) == PLAIN:
            if gradient is not None:
                self._accumulate(node, gradient)
            return
        waiting = self._pending.setdefault(node, {})
        known = waiting.get(number)
        self._lacking |= gradient is None
        if known is None:
            waiting[number] = gradient
        elif gradient is not None:
            waiting[number] = total(known, gradient)

    def _accumulate(self, node: Node, gradient: Tensor, shared: bool = True, number: int = 0) -> None:
        """Accumulate the gradient of a leaf (complete, if the leaf has hooks), or capture a gradient for the driver."""
        # Of a node that runs by hand, the function may have kept the gradient, or passed on the one that it got. So
        # unless the engine has made it, it counts as `shared`.
        if self._spec.captures:
            if self._capture is not None:
                self._capture.take((node, number), gradient)
            return
        leaf = node.variable
        if id(leaf) in self._unsharded:
            return  # a hook has given it to FSDP
        # Kept until the gradients of all replicated leaves are known, see `_reduce`: a reducer takes them in one call.
        if id(leaf) in self._replicated:
            self._unreduced[node] = gradient
            return
        (changed,) = node_calls.call_hooks(node_calls.hooks_before_leaf(node), (gradient,))
        if changed is None:
            return
        whole = self._context.gradients.add(leaf, changed, self._spec.create, shared)
        behind = node_calls.hooks_behind_leaf(node)
        if leaf._post_accumulate_grad_hooks or behind:
            left = node_calls.call_hooks_of_leaf(leaf, whole, changed, behind)
            if left is not whole:
                self._context.gradients.replace(leaf, left)


def outputs_reached(starts: Iterable[tuple[Any, ...]]) -> dict[Origin, set[int]]:
    """Return the indices of the tensors of each message that a pass reaches from these outputs of nodes."""
    stack: list[Any] = list(starts)
    seen: set[Node] = set()
    reached: dict[Origin, set[int]] = {}
    while stack:
        node, number, *_ = stack.pop()
        if type(node) is RecvNode:
            recv: Any = node
            reached.setdefault(recv.origin, set()).add(number)
        elif node is not None and node not in seen:
            seen.add(node)
            stack += node.next_functions
    return reached
