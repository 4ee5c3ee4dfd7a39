"""Run the program of a row in one process, and with its calls on another worker."""

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from telegrad import autograd
from tests.twin.sight import describe

MODULE = "program_of_a_limit"  # the module of the programs' functions and classes

GIVEN = """
import copy
import torch
import torch.distributed as dist
from torch import nn
import telegrad.rpc as rpc
from telegrad import autograd, checkpoint
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.weights import Publisher, Shard, ShardedPublisher, ShardedSubscriber, Subscriber


def leaf(*shape, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3, 3)), generator=generator, dtype=dtype).requires_grad_()


def echo(value):
    return value


def apply(function, value):
    return function(value)


def gradients_of(result, *leaves):
    backward(result.sum())
    return gradients(*leaves)


def through(function, *args):
    return gradients_of(call(function, *args), *args)


def stepped(layer, optimizer):
    backward(layer(x).sum())
    optimizer.step()
    return layer.state_dict()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(a):
        return a.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def one_process():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


x = leaf()
"""

HERE = """
def call(function, *args, **kwargs):
    return function(*args, **kwargs)


def backward(loss, **options):
    loss.backward(**options)


def gradients(*leaves):
    return [each.grad for each in leaves]


def grad(outputs, inputs, **options):
    return torch.autograd.grad(outputs, inputs, **options)


def made(cls, *args, **kwargs):
    return cls(*args, **kwargs)


class Opt:
    def __init__(self, cls, module, **options):
        self.own = cls(module.parameters(), **options)

    def step(self):
        self.own.step()
"""

THERE = """
def call(function, *args, **kwargs):
    return rpc.rpc_sync("w1", function, args, kwargs)


def backward(loss, **options):
    autograd.backward(context_id, loss, **options)


def gradients(*leaves):
    found = autograd.get_gradients(context_id)
    return [found.get(each) for each in leaves]


def grad(outputs, inputs, **options):
    return autograd.grad(context_id, outputs, inputs, **options)


def made(cls, *args, **kwargs):
    return RemoteModule("w1", cls, args, kwargs)


class Opt:
    def __init__(self, cls, module, **options):
        self.own = DistributedOptimizer.for_module(cls, module, **options)

    def step(self):
        self.own.step(context_id)
"""


@contextlib.contextmanager
def module(given: str, names: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the definitions of a program in a module that calls can import; yield its names."""
    made = sys.modules[MODULE] = types.ModuleType(MODULE)
    made.__dict__.update(names)
    try:
        exec(given, made.__dict__)
        yield made.__dict__
    finally:
        del sys.modules[MODULE]


def in_both(program: str) -> tuple[Any, Any]:
    """Return the results of a program in one process, and on workers."""
    with module(GIVEN + HERE, {}) as names:
        here = _found(program, names)
    with autograd.context() as context_id, module(GIVEN + THERE, {"context_id": context_id}) as names:
        return here, _found(program, names)


def _found(program: str, names: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    exec(program, names)
    return describe(names["found"])
