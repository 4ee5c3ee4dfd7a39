"""Imports without garbage collection: a collection of all objects that torch creates takes longer than the imports."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of telegrad


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Delay garbage collection to the end of the `with`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # the new objects are in the oldest generation now, and are not traversed at once
            gc.enable()
