"""Distributed model parallelism for PyTorch: remote calls, remote references, autograd, modules, optimizers."""

from telegrad import errors
from telegrad.version import VERSION as __version__

__all__ = ["__version__", "errors"]
