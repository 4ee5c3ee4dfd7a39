"""Modules that `fully_shard` distributes over two trainers, and programs that use them with another worker."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from telegrad import autograd
from telegrad.rpc import rpc_sync

Call = Callable[..., Tensor]  # calls a function, on another worker or locally


def join(rank: int, port: int) -> None:
    import torch.distributed.fsdp  # the import takes seconds

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


class Net(nn.Module):
    """A module with two parts that are sharded by themselves, and a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lower = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.upper, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.upper(self.lower(x))
        return self.head(hidden.tanh())


def shard(net: nn.Module, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    if isinstance(net, nn.ModuleList):  # of modules that are sharded separately
        for each in net:
            fully_shard(each, **options)
        return net
    if isinstance(net, Net):
        fully_shard(net.lower, **options)
        fully_shard(net.upper, **options)
    return fully_shard(net, **options)


def lookup(x: Tensor) -> Tensor:
    return x.sin()


def mean_square(x: Tensor) -> Tensor:
    return (x**2).mean()


def net_behind(net: nn.Module, call: Call, x: Tensor) -> Tensor:
    return mean_square(net(call(lookup, x)))


def net_before(net: nn.Module, call: Call, x: Tensor) -> Tensor:
    return call(mean_square, net(x.detach()))


def two_losses(net: nn.Module, call: Call, x: Tensor) -> Tensor:
    """Return the sum of two losses, one of which goes through another worker."""
    y = net(call(lookup, x))
    return mean_square(y) + call(mean_square, y)


def sent_and_not_used(net: nn.Module, call: Call, x: Tensor) -> Tensor:
    y = net(call(lookup, x))
    call(lookup, y)
    return mean_square(y)


def used_twice(net: nn.Module, call: Call, x: Tensor) -> Tensor:
    return mean_square(net(call(lookup, x))) + net(x * 2).sum()


def two_calls(net: nn.Module, call: Call, x: Tensor) -> Tensor:
    y = net(call(lookup, x))
    return call(mean_square, y) + call(mean_square, y.tanh())


def batch(rank: int) -> Tensor:
    return (torch.arange(8.0).reshape(2, 4) * (rank + 1)).requires_grad_()


def far(function: Any, *args: Any) -> Any:
    return rpc_sync("worker2", function, args)


def near(function: Any, *args: Any) -> Any:
    return function(*args)


def local(tensor: Any) -> Tensor:
    return tensor.to_local().clone()


def same(program: Any, rank: int, passes: int = 1, kind: type[nn.Module] = Net, **options: Any) -> list[bool]:
    """Compare gradients of parameters and of the input inside and outside of a context, bit for bit."""
    outside, inside = shard(kind(), **options), shard(kind(), **options)
    x, y = batch(rank), batch(rank)
    for _ in range(passes):
        program(outside, near, x).backward()
    parameters = [parameter for parameter in inside.parameters() if parameter.requires_grad]
    trained = [parameter for parameter in outside.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    for _ in range(2):
        with autograd.context() as context:
            for _ in range(passes):
                autograd.backward(context, program(inside, far, y))
            found = autograd.get_gradients(context)
    pairs = [(local(found[one]), local(other.grad)) for one, other in zip(parameters, trained, strict=True)]
    if x.grad is not None:
        pairs.append((found[y], x.grad))
    kept = [bool((local(parameter.grad) == 7.0).all()) for parameter in parameters]
    return [*(torch.equal(one, other) for one, other in pairs), *kept]
