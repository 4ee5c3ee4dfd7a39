# before: model = nn.Sequential
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import telegrad
import telegrad.autograd as autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

workers = telegrad.local(["worker1"])
tokens, labels = torch.randint(10_000, (8,)), torch.randint(2, (8,))
