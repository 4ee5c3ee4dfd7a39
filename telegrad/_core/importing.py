"""Imports that no garbage collection interrupts: to look through all that torch has made takes longer than they do."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of telegrad


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect later what is left over in here."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # what was made is old now: it is not looked through at once
            gc.enable()
