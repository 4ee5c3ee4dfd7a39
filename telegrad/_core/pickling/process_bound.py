"""Objects bound to this process, such as open files, connections and views of memory. They are not sent.

Pickling refuses most of them, and copies the others: cloudpickle converts a text file to a `StringIO`. A
`multiprocessing` connection arrives as a descriptor number, which is another file at the receiver and is closed with
the connection. A memoryview would arrive as bytes, without its format and shape.
"""

from __future__ import annotations

import io
import sys
import tempfile
from multiprocessing.connection import _ConnectionBase
from typing import Any

import torch.fx

from telegrad._core.pickling.reducers import REDUCERS

_FILE = "Send its path and open it there, or send what it holds, as file.read() gives it"
_ADVICE: dict[type, str] = {
    io.TextIOWrapper: _FILE,
    io.BufferedReader: _FILE,
    io.BufferedWriter: _FILE,
    io.BufferedRandom: _FILE,
    io.BufferedRWPair: _FILE,
    io.FileIO: _FILE,
    tempfile._TemporaryFileWrapper: _FILE,
    tempfile.SpooledTemporaryFile: _FILE,
    tempfile.TemporaryDirectory: "Send its path, which is its `name`",
    torch.fx.Proxy: "It stands for a value while torch.fx traces: trace what runs on one worker, and call the result",
    memoryview: "Send bytes(view), or the object that it is a view of",
    _ConnectionBase: "Send the values themselves by calls: a worker's rpc_sync, or rpc_stream for many",
}
_OWN_WAY = {"__reduce__", "__reduce_ex__", "__getstate__"}  # methods by which a subclass defines its own pickling


class BoundToProcess(TypeError):
    """Raised for an object that cannot be sent; `advice` says what to send instead."""

    def __init__(self, advice: str) -> None:
        super().__init__("it belongs to this process, and to no other")
        self.advice = advice


def _refuse(pickler: Any, obj: Any) -> Any:
    for name in ("stdout", "stderr"):
        if obj is getattr(sys, name):
            return _stream, (name,)
    for kind in type(obj).__mro__:
        if kind in _ADVICE:
            raise BoundToProcess(_ADVICE[kind])
        if _OWN_WAY & vars(kind).keys():
            break
    return NotImplemented


def _stream(name: str) -> Any:
    return getattr(sys, name)


REDUCERS.update(dict.fromkeys(_ADVICE, _refuse))
