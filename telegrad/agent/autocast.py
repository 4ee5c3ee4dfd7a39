"""The caller's autocast, which holds in the function that it calls, too."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from telegrad.devices import streams
from telegrad.wire.tensors import DTYPES, NAMES

is_on = torch._C._is_any_autocast_enabled  # for a device, whichever: the fastest way to ask


def described() -> bytes:
    """That of this thread: for which kinds of devices, to what type, and whether casts are kept."""
    kinds = [kind for kind in ("cpu", streams.kind()) if kind and torch.is_autocast_enabled(kind)]
    types = {kind: NAMES[torch.get_autocast_dtype(kind)] for kind in kinds}
    return pickle.dumps((types, torch.is_autocast_cache_enabled()), 5)


@contextmanager
def entered(description: bytes | memoryview) -> Iterator[None]:
    """Inside, that of the caller holds, for the devices that this worker has."""
    types, cached = pickle.loads(description)
    with ExitStack() as stack:
        for kind, name in types.items():
            if kind in ("cpu", streams.kind()):
                stack.enter_context(torch.autocast(kind, DTYPES[name], cache_enabled=cached))
        yield
