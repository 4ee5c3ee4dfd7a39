# before: [RemoteModule("w1", First)
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import telegrad
import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
import telegrad.rpc as rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

workers = telegrad.local(["w1", "w2", "w3"], driver="w0")
padding = -1
First, Second, Third = partial(nn.Linear, 4, 8), partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)
batches = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(2)]


# before: balance=[3, 2, 1]
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])

    def forward(self, value):
        return self.layers(value)


batch = torch.randn(8, 4)
model, sequence = Layers(), nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])


# before: tied=
class Start(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)

    def forward(self, tokens):
        return self.embedding(tokens)


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, value):
        return self.head(value)


stages = [RemoteModule("w1", Start), RemoteModule("w2", Second), RemoteModule("w3", End)]

# after: tied=
assert len(pipeline.state_dict()) > 2

# before: count = (targets
pipeline = Pipeline([RemoteModule("w1", First), RemoteModule("w2", Second), Third()], chunks=8)
context = autograd.context()
context_id = context.__enter__()

# after: count = (targets
context.__exit__(None, None, None)

# before: pipeline.replace(1
optimizer = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=1e-3)
checkpoint.save({"model": pipeline, "optimizer": optimizer}, "runs/100")
