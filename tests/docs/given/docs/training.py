# before: RemoteModule("ps0/cpu"
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import telegrad
import telegrad.rpc as rpc

workers = telegrad.local(["ps0", "w1", "w2"])
batches = [(torch.randint(10_000, (8,)), torch.randint(2, (8,))) for _ in range(2)]


# before: [RemoteModule("w1", First)
from functools import partial

First, Second, Third = partial(nn.Linear, 4, 8), partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)
inputs, targets = torch.randn(16, 4), torch.randint(3, (16,))

# before: "model": model,
optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

# before: action = policy_rref
Policy.network = nn.Linear(4, 2)
policy_rref = rpc.remote("ps0", Policy)
state = torch.ones(4)

# at the end
assert action.shape == (2,)
