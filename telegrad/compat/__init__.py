"""Programs written for `torch.distributed.rpc`, run on Telegrad: `install()`, or `python -m telegrad script.py`.

This file and `inheritance.py` import no torch: they run at the start of every process that inherits the mode.
"""

from telegrad.compat.inheritance import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
