"""Run programs written for `torch.distributed.rpc` on Telegrad: `install()`, or `python -m telegrad script.py`.

This file and `inheritance.py` do not import torch, because they run at the start of every process that inherits the
mode.
"""

from telegrad.compat.inheritance import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
