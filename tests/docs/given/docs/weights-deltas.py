# before: deltas="small"
from functools import partial

import torch
from torch import nn

import telegrad
from telegrad import weights
from telegrad.nn import RemoteModule
from telegrad.weights import Publisher

workers = telegrad.local([f"owner{rank}" for rank in range(4)])
model = nn.Sequential(RemoteModule("owner0", nn.Linear, (4, 4)), nn.Linear(4, 4))
local_model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

# before: def rows_of(rank)
table = nn.Embedding(4000, 256)

# before: columns =
parts.publish()
