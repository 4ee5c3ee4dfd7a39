"""Saves a model that is spread over workers, and what belongs to its training; all owners write and read at once.

The files are those of `torch.distributed.checkpoint`, which can read them, too, without any worker.
"""

from telegrad.checkpoint.folders import latest
from telegrad.checkpoint.loading import load
from telegrad.checkpoint.saving import save

__all__ = ["latest", "load", "save"]
