"""Host copies of the state for saves in the background. Their memory is kept for the next save.

New memory costs as much as the copy: the kernel clears each of its pages first. A device copies asynchronously only
into page-locked memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Kind = tuple[torch.dtype, int, bool]  # type of elements, their number, True if the pages are locked


class HostMemoryPool:
    """The free memory for copies on one worker."""

    def __init__(self, _: Any) -> None:
        self._lock = threading.Lock()  # guards _free
        self._free: dict[Kind, list[Tensor]] = {}

    def take(self, kind: Kind) -> Tensor:
        with self._lock:
            free = self._free.get(kind)
            if free:
                return free.pop()
        dtype, count, locked = kind
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=locked)

    def put(self, used: list[tuple[Kind, Tensor]]) -> None:
        """Keep the memory of one save. Free all other memory here, which limits the total to one save."""
        by_kind: dict[Kind, list[Tensor]] = {}
        for kind, memory in used:
            by_kind.setdefault(kind, []).append(memory)
        with self._lock:
            self._free = by_kind


class Copies:
    """The copies of one save."""

    def __init__(self, shelf: HostMemoryPool, note: Callable[[], None]) -> None:
        """`note` is called for each tensor."""
        self._shelf = shelf
        self._note = note
        self._used: list[tuple[Kind, Tensor]] = []
        self._made: dict[tuple[Any, ...], Tensor] = {}  # of tensors that occur in the state several times
        self._devices: set[torch.device] = set()

    def of(self, value: Any) -> Any:
        """Return a copy of the current value."""
        with torch.inference_mode(False), torch.no_grad():
            made = self._copy(value)
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        return made

    def give_back(self) -> None:
        """Return the memory, because the copies are no longer needed."""
        self._shelf.put(self._used)
        self._used = []

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if type(value) is dict:
            return {key: self._copy(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self._copy, value))
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        self._note()
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().cpu().clone()
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        made = self._made.get(key)
        if made is None:
            on_device = tensor.device.type != "cpu"
            kind = tensor.dtype, tensor.numel(), on_device
            memory = self._shelf.take(kind)
            self._used.append((kind, memory))
            made = self._made[key] = memory.view(tensor.shape)
            made.copy_(tensor, non_blocking=on_device)
            if on_device:
                self._devices.add(tensor.device)
        return made
