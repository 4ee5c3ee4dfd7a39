"""Backward passes across workers: `telegrad.autograd`."""

from telegrad.autograd.entry_points import backward, backward_async, context, get_gradients, grad

__all__ = ["backward", "backward_async", "context", "get_gradients", "grad"]
