"""Save and load a model that is spread over workers, and other training state. All owners write and read concurrently.

The file format is that of `torch.distributed.checkpoint`, which can read the files without any worker.
"""

from telegrad.checkpoint.folders import latest
from telegrad.checkpoint.loading import load
from telegrad.checkpoint.saving import save

__all__ = ["latest", "load", "save"]
