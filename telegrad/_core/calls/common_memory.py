"""Memory that several workers of a host map, for tensors that one worker sends to many."""

from __future__ import annotations

import torch
from torch import Tensor

from telegrad._core.memory.blobs import SHARE_FROM
from telegrad._core.memory.warm_memory import SharedBlockPool


class SharedBuffers:
    def __init__(self, pool: SharedBlockPool, is_shared: bool) -> None:
        """`is_shared`: other workers of this host can map memory of this worker."""
        self._pool = pool
        self._is_shared = is_shared

    def common(self, size: int) -> Tensor:
        """Return `size` bytes of memory, from which tensors are lent to workers of this host without a copy.

        Each receiver's writes are private to it. The sender must not write to the memory after sending. The memory is
        reused once no tensor on any worker uses it. Over TCP, or where memory cannot be shared, the memory is ordinary.
        """
        tensor = self._pool.common(size) if self._is_shared and size >= SHARE_FROM else None
        if tensor is not None:
            return tensor
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8)

    def private(self, tensor: Tensor) -> Tensor:
        """Return a private copy-on-write view of common memory, as receivers get it; copy plain memory."""
        return self._pool.private(tensor)

    def in_common(self, blob: Tensor) -> Tensor:
        """Return a copy in shared memory, for many workers of this host; return `blob` itself if there is no room."""
        copy = None if self._pool.is_common(blob) else self._pool.common(blob.numel())
        if copy is None:
            return blob
        with torch.inference_mode(False), torch.no_grad():
            return copy.copy_(blob)
