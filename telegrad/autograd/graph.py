"""What joins the graphs of two workers: on one side the edges of the tensors that were sent, on the other a Recv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from telegrad.group.members import Identity

if TYPE_CHECKING:
    from telegrad.autograd.contexts import Context


class Send(NamedTuple):
    """A message that took tensors away: where their gradients will come in. A leaf stands for itself."""

    edges: list[GradientEdge | Tensor]
    to: str
    what: Any  # the function whose arguments or result they are

    def __str__(self) -> str:
        name = getattr(self.what, "__name__", None) or (self.what if isinstance(self.what, str) else "a call")
        return f"{len(self.edges)} tensor(s) sent to {self.to!r} with {name}"


class Origin:
    """Where received tensors came from."""

    __slots__ = ("context", "number", "sender")

    def __init__(self, context: Context, sender: Identity, number: int) -> None:
        self.context = context
        self.sender = sender
        self.number = number  # the message's, to its sender


class Recv(torch.autograd.Function):
    """The received tensors of one message hang on one node, which passes their gradients on to their sender.

    Its only input, the anchor, is an empty leaf made for it alone: whoever wants its gradient makes the engine run
    the node.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, origin: Origin, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.anchor = anchor
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.origin.context.gradients_of(ctx.origin, gradients)
        return None, None, None


RecvNode: type = Recv._backward_cls
_apply: Callable[..., Sequence[Tensor]] = super(torch.autograd.Function, Recv).apply  # without looking for transforms
FIRST = 1 << 63  # of the nodes that are ready the engine runs that of the highest number: what leaves shall not wait


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the gradient of a tensor comes in."""
    if tensor.layout is not torch.strided:  # torch would view it, which only dense ones can be
        with torch.enable_grad():
            token = tensor.clone().grad_fn
        assert token is not None
        node, number = token.next_functions[0]
        assert node is not None
        return GradientEdge(node, number, token)
    made_by = tensor.grad_fn
    if made_by is None or isinstance(made_by, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(made_by, tensor.output_nr)


def device_of(edge: GradientEdge | Tensor) -> torch.device:
    """Where the gradient of an edge is expected."""
    if isinstance(edge, Tensor):
        return edge.device
    variable: Any = getattr(edge.node, "variable", None)
    found: torch.device = (edge.node._input_metadata[edge.output_nr] if variable is None else variable).device
    return found


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], wanted: Sequence[Any], retain: bool, create: bool
) -> Sequence[Tensor | None]:
    """What `torch.autograd.grad` gives, without its checks of what users may give it."""
    given: Sequence[Tensor | None] = _engine_run_backward(
        tuple(roots), tuple(gradients), retain, create, tuple(wanted), True, accumulate_grad=False
    )
    return given


def send(tensors: Sequence[Tensor], to: str, what: Any) -> Send:
    """What keeps the graph of tensors that leave; of a node in Python it is the edge's token that does."""
    return Send([tensor if tensor.is_leaf else edge_of(tensor) for tensor in tensors], to, what)


def receive(tensors: Sequence[Tensor], origin: Origin) -> Sequence[Tensor]:
    """The same tensors with a history."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # of whoever waits; they were sent in another
        with torch.inference_mode(False), torch.enable_grad():
            return receive(tensors, origin)
    anchor = torch.empty(0, requires_grad=True)
    received = _apply(anchor, origin, tensors)
    hurry = getattr(received[0].grad_fn, "_set_sequence_nr", None)
    if hurry is not None:
        hurry(FIRST)
    return received
