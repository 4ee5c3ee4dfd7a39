"""Optimizers for parameters on several workers: `telegrad.optim`."""

from telegrad.optim.clipping import clip_grad_norm_
from telegrad.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]
