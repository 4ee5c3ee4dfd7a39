"""Memory that several workers of a host map, for tensors that one worker sends to many."""

from __future__ import annotations

import torch
from torch import Tensor

from telegrad._core.memory.blobs import SHARE_FROM
from telegrad._core.memory.warm_memory import SharedPool


class CommonMemory:
    """That of one worker."""

    def __init__(self, pool: SharedPool, is_shared: bool) -> None:
        """`is_shared`: other workers of this host can map memory of this one."""
        self._pool = pool
        self._is_shared = is_shared

    def common(self, size: int) -> Tensor:
        """Return memory of bytes from which what lies at its beginning is lent to workers of this host, and not copied.

        Each worker sees in it what it holds, and what it writes alone. Nothing may be written to it here once it was
        sent: it is used anew by itself, when no tensor looks at it, neither here nor there. Over TCP, and where no
        memory can be shared, it is as any other.
        """
        tensor = self._pool.common(size) if self._is_shared and size >= SHARE_FROM else None
        if tensor is not None:
            return tensor
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8)

    def private(self, tensor: Tensor) -> Tensor:
        """Return what lies in common memory as other workers see it; plain memory is copied."""
        return self._pool.private(tensor)

    def in_common(self, blob: Tensor) -> Tensor:
        """Return a copy in common memory, for many workers of this host; or `blob` itself, if there is no room."""
        copy = None if self._pool.is_common(blob) else self._pool.common(blob.numel())
        if copy is None:
            return blob
        with torch.inference_mode(False), torch.no_grad():
            return copy.copy_(blob)
