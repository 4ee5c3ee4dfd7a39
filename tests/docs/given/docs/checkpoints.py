# before: "model": model,
import torch
from torch import nn

import telegrad
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

workers = telegrad.local(2)
model = nn.Sequential(RemoteModule("worker0", nn.Linear, (4, 4)), RemoteModule("worker1", nn.Linear, (4, 4)))
optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)


def train(state):
    pass


# before: for state["step"] in range
state["step"] = 9_599

# after: for state["step"] in range
checkpoint.save(state, "runs/last")

# at the end
assert found == "runs/last"
assert state["step"] == 9_999
