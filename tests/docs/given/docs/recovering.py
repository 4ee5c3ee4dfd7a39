# before: rpc.publish("table", load_table)
import torch
from torch import nn

import telegrad
import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
import telegrad.rpc as rpc
from telegrad import errors
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

workers = telegrad.local(["server"])
STEPS = 300


class Table:
    def row(self, number):
        return number


load_table = Table


# before: ref = rpc.remote("server", Model
class Model(nn.Linear):
    def __init__(self, size=4):
        super().__init__(size, size)


# after: ref = rpc.remote("server", Model
assert ref.rpc_sync().extra_repr()
assert module(torch.ones(64)).shape == (64,)

# before: if last := checkpoint.latest("runs")
Model = lambda: nn.Sequential(RemoteModule("server", nn.Linear, (4, 4), restore=True), nn.Linear(4, 1))
scheduler = None


def train(state, steps):
    with autograd.context() as context_id:
        autograd.backward(context_id, state["model"](torch.ones(4)).sum(), step=optimizer)
    state["step"] += steps


# at the end
assert checkpoint.latest("runs") == "runs/300"
