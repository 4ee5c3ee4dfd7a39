"""Distributed model parallelism for PyTorch: remote calls now; references and autograd across machines to come."""

from telegrad import errors
from telegrad.version import VERSION as __version__

__all__ = ["__version__", "errors"]
