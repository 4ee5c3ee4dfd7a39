"""The edges between the graphs of two workers: tensors that are sent and received, and gradients on their way back.

The sender keeps a `Send`, the edges of the tensors in a message. The receiver makes a `Recv` node for the received
tensors, whose `Origin` names the `Send` that gets their gradients. Torch's graph ends at a process, so the two objects
know each other by the number of the message. In a backward pass gradients enter a worker's graph at a `Send`. A `Recv`
is an end of that graph, and runs as early as possible, because another worker waits for its gradients.

An `Outbox` has the outgoing gradients of one worker's part of a pass. Those for one worker that become ready in the
same step share a message. The last gradients of a step wait for this worker's report, which is known a moment later,
and take it along, with the reports that other workers sent here. If the step takes longer than expected, the timer
thread sends all that waits: other workers need the gradients, and the driver needs the reports to know the workers that
have tasks.

Two threads send: the one that runs the tasks, and the timer thread. The report must name every message that has left
before it, because the driver counts them. This is the order that keeps it true:

1. A message gets its key, which puts it into `sent`, and then leaves `_ready`, both under the lock.
2. The thread that runs the tasks sends all that it finds in `_ready`, and only then takes `sent` for the report.

So gradients that the timer has taken from `_ready` are in `sent` before the other thread can find `_ready` empty. And
the thread that wants to send its report with the last gradients learns from `send` whether they were still there. If
not, the report goes to the driver by itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad._core.agent.agent import Agent
from telegrad._core.membership.members import Identity
from telegrad.autograd.passes import NOWHERE, WITHOUT, Key, PackedShipment, PassReport, PassSpec
from telegrad.errors import UsageError

UNKNOWN = 0  # the number of a message sent under `no_grad`, whose tensors were not recorded
FIRST = 1 << 63  # the engine runs the ready node with the highest number first: outgoing gradients must not wait
SMALL = 4096  # bytes of a gradient that is sent in contiguous form
MOST_CARRIED = 16  # reports that travel with gradients; longer chains of workers send some to the driver meanwhile

GradientsByMessage = list[tuple[int, Sequence[Any]]]

# The addresses of contexts in which tensors were received; each use is one atomic operation. A forked child keeps them:
# graphs that it inherits must not run without the gradients of other workers there either.
receiving: set[int] = set()

# Torch's graph of one process

# Torch's engine itself, and not the one by which `guard` replaces it: that one refuses calls whose results lack
# gradients of other workers, as the calls of a pass do.
_ENGINE: Any = torch._C._ImperativeEngine()


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a tensor enters."""
    if tensor.layout is not torch.strided:  # torch would make a view, and only dense tensors have views
        with torch.enable_grad():
            token = tensor.clone().grad_fn
        assert token is not None
        node, number = token.next_functions[0]
        assert node is not None
        return GradientEdge(node, number, token)
    # `get_gradient_edge` costs more, but a leaf needs it to find its node, and a Python node needs the token that it
    # makes: such a node does not keep its graph alive.
    made_by = tensor.grad_fn
    if made_by is None or isinstance(made_by, torch._C._FunctionBase):
        if torch.is_inference_mode_enabled():  # there torch finds no edge of a leaf
            with torch.inference_mode(False):
                return get_gradient_edge(tensor)
        return get_gradient_edge(tensor)
    return GradientEdge(made_by, tensor.output_nr)


def nodes_behind(starts: Iterable[Any], stop: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph behind `starts`, each once, except `stop` and the nodes that only these lead to."""
    stack, seen = [*starts], {None, *stop}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions]


def expected_at(node: Any, number: int) -> Any:
    """Return an object with the shape, the type and the device of the gradient of a node's output."""
    return node.variable if hasattr(node, "variable") else node._input_metadata[number]


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], wanted: Sequence[Any], retain: bool, create: bool
) -> Sequence[Tensor | None]:
    """Return the result of `torch.autograd.grad`, without its checks of user arguments."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # another thread may be importing it
    if getattr(compiled, "compiled_autograd_enabled", False):
        raise UsageError(
            "a backward pass over several workers cannot be compiled: begin it outside compiled autograd "
            "(torch._dynamo.config.compiled_autograd)"
        )
    given: Sequence[Tensor | None] = _ENGINE.run_backward(
        tuple(roots), tuple(gradients), retain, create, tuple(wanted), True, accumulate_grad=False
    )
    return given


# Sends and receipts


class Send(NamedTuple):
    """A message that contained tensors: the edges at which their gradients will enter, which keep the graph alive.

    A leaf has no edge and is kept itself. A Python node is kept alive by the edge's token.
    """

    edges: list[GradientEdge | Tensor]
    to: str
    what: Any  # the function whose arguments or result they are

    def __str__(self) -> str:
        name = getattr(self.what, "__name__", None) or (self.what if isinstance(self.what, str) else "a call")
        return f"{len(self.edges)} tensor(s) sent to {self.to!r} with {name}"


class Origin:
    """The message that the tensors came in, which gets their gradients."""

    __slots__ = ("after", "context", "number", "sender")

    def __init__(self, context: Any, sender: Identity, number: int, after: int = 0) -> None:
        self.context = context  # an `AutogradContext`
        self.sender = sender
        self.number = number  # given by the sender
        self.after = after  # the number of the last message that this worker had sent in the context before

    def may_lead_behind(self, first: float) -> bool:
        """Return True if gradients sent there may come back to tensors sent in message `first` or later."""
        return self.after >= first or self.number == UNKNOWN

    def refusal(self) -> UsageError:
        """Return the error for a gradient that came here while torch's engine ran the graph without a pass."""
        if self.number == UNKNOWN:
            return UsageError(
                f"a gradient leads to a tensor that worker {self.sender.name!r} sent in a call under torch.no_grad(), "
                "but the tensor has a graph there, because it was made under torch.enable_grad() or before the call. "
                "Make the call without no_grad, or detach the tensor"
            )
        return UsageError(
            f"the graph leads to tensors that came from worker {self.sender.name!r} in context {self.context.id}. "
            "Run it with telegrad.autograd.backward or telegrad.autograd.grad, inside that context"
        )


class Recv(torch.autograd.Function):
    """One node for all received tensors of one message. It sends their gradients to the sender of the tensors.

    Its only input, the anchor, is an empty leaf made for it alone: asking for its gradient makes the engine run the
    node.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, origin: Origin, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.anchor = anchor
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        origin = ctx.origin
        running = origin.context.running
        if running is None:
            raise origin.refusal()
        running.ship(origin, gradients)
        return None, None, None


RecvNode: type = Recv._backward_cls
# skips the check for function transforms
_apply: Callable[..., Sequence[Tensor]] = super(torch.autograd.Function, Recv).apply


def receive(tensors: Sequence[Tensor], origin: Origin) -> Sequence[Tensor]:
    """Return the tensors with a Recv as history, which sends their gradients to their origin."""
    # the mode of the receiving thread, not that of the sender
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            return receive(tensors, origin)
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    received = _apply(anchor, origin, tensors)
    hurry = getattr(received[0].grad_fn, "_set_sequence_nr", None)
    if hurry is not None:
        hurry(FIRST)
    return received


# Outgoing gradients


def packed(
    spec: PassSpec, key: Key, gradients: GradientsByMessage, reports: Sequence[PassReport] = ()
) -> tuple[PackedShipment, list[Tensor]]:
    """Return the message for gradients of several sent messages, with reports for the driver, and its tensors."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}  # a gradient often goes to several tensors of a message
    slots: list[tuple[int, list[int | None]]] = []
    for number, several in gradients:
        own: list[int | None] = []
        for gradient in several:
            if gradient is None or gradient is WITHOUT:
                own.append(None if gradient is None else NOWHERE)
                continue
            place = places.setdefault(id(gradient), len(tensors))
            if place == len(tensors):
                # Often one repeated number, which is copied faster than described.
                if not spec.create and gradient.layout is torch.strided and gradient.nbytes < SMALL:
                    gradient = gradient.contiguous()
                tensors.append(gradient)
            own.append(place)
        slots.append((number, own))
    said = [report[1:] for report in reports] if reports else ()
    shipment = PackedShipment(tuple(spec), key, slots, said)  # type: ignore[arg-type]
    return shipment, tensors


class Outbox:
    """Outgoing gradients of one pass, gathered while more for the same worker are about to come; and reports."""

    def __init__(
        self, agent: Agent, context: Any, spec: PassSpec, is_short: bool, gathers: Callable[[Outbox], None]
    ) -> None:
        """`gathers` is called when gradients or reports begin to wait; it must have `send_early` called soon.

        If this worker's part is expected to be short, the last gradients of a step wait for the report and leave with
        it. The driver's own report is no message.
        """
        self.spec = spec
        self.context = context
        self.worker = agent.name
        self.holds = is_short and spec.driver != agent.name  # never True again after `send_early` had to send
        self.reached: set[str] = set()  # workers to which something was sent
        self._agent = agent
        self._gathers = gathers
        self._held: Identity | None = None  # gradients for this worker wait for the report
        # Guards changes of `sent` and the fields below while _ready holds anything. Gradients leave _ready when they
        # are in `sent`. So a thread that finds nothing there, which needs no lock, can make the report. While _ready is
        # empty, the timer thread changes neither `sent` nor _keys, so `key` and `LocalPart.report` need no lock then.
        self._lock = threading.Lock()
        self._ready: dict[Identity, GradientsByMessage] = {}
        self.sent: list[tuple[Key, str]] = []  # messages since the last report, and their recipients
        self._carried: list[PassReport] = []  # of other workers
        self._keys = 0

    def key(self, worker: str) -> Key:
        """Record that a message is sent to a worker now; return its key."""
        self.reached.add(worker)
        self._keys += 1
        key = self.worker, self._keys
        self.sent.append((key, worker))
        return key

    def add(self, worker: Identity, number: int, gradients: Sequence[Tensor | None], more: bool, last: bool) -> None:
        """Queue gradients for one message of a worker.

        `more`: the same step will bring others for that worker. `last`: it will bring no others at all.
        """
        with self._lock:
            gathered = self._ready.setdefault(worker, [])
            first = not gathered
            gathered.append((number, gradients))
        # Gradients wait for others of this step that go to the same worker. The last gradients of the step wait for the
        # report, if this worker's part is expected to be short.
        if last and self.holds:
            self._held = worker
        elif not more:
            self.send(worker)
            return
        if self._agent.streams.used:
            self._agent.streams.publish()  # another thread may send them
        if first:
            self._gathers(self)

    def flush(self) -> None:
        """Send all gradients except those that wait for the report."""
        for worker in list(self._ready):
            if not (self.holds and worker == self._held):
                self.send(worker)

    def carry(self, shipment: PackedShipment) -> Sequence[PassReport]:
        """Take the reports that came with gradients. Return the reports to send to the driver now."""
        with self._lock:
            self._carried += [PassReport(self.spec, *fields) for fields in shipment.reports]
        if self.holds and len(self._carried) <= MOST_CARRIED:
            self._gathers(self)
            return ()
        return self._pop_carried()

    def _pop_carried(self) -> Sequence[PassReport]:
        with self._lock:
            carried, self._carried = self._carried, []
            return carried

    def send_early(self) -> Sequence[PassReport]:
        """Stop waiting, since this worker's part takes long: send all gradients. Return the reports to send."""
        if self._ready or self._carried:
            self.holds = False
            self.flush()
        return self._pop_carried()

    def finish(self, report: Callable[[], PassReport]) -> Sequence[PassReport]:
        """Send all gradients, the last ones with the reports. Return the reports if there were no gradients."""
        # The report must come with the last message: it names the others. If the timer thread has just sent those
        # gradients, `send` returns False, and the caller sends the reports by themselves.
        waiting = list(self._ready)  # an atomic copy
        for worker in waiting[:-1]:
            self.send(worker)
        if waiting and self.send(waiting[-1], report):
            return ()
        return [*self._pop_carried(), report()] if self._carried else [report()]

    def send(self, worker: Identity, report: Callable[[], PassReport] | None = None) -> bool:
        """Send the gradients for a worker, with `report` and all other reports. Return False if there are none."""
        with self._lock:
            gathered = self._ready.get(worker)
            if gathered is None:
                return False
            key = self.key(worker.name)  # before the gradients leave `_ready`, see the header
            del self._ready[worker]
        streams = self._agent.streams
        if streams.used:
            streams.adopt(*(each for _, gradients in gathered for each in gradients))
        reports: Sequence[PassReport] = ()
        if report is not None:
            reports = [*self._pop_carried(), report()]
        shipment, tensors = packed(self.spec, key, gathered, reports)
        context = self.context if self.spec.create else None
        self._agent.notify(worker.name, shipment, worker.incarnation, tensors, context)
        return True
