"""Values, tensors and exceptions as bytes."""

from telegrad._core.pickling.exceptions import describe, fresh, rebuild, without_frames
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.remote_text import first_line
from telegrad._core.wire.messages import INFERENCE, NO_GRAD
from telegrad._core.wire.packing import pack
from telegrad._core.wire.tensors import (
    CONJ,
    DTYPES,
    NEG,
    Strides,
    contiguous_strides,
    distinct,
    extent_of,
    joined,
    memory,
    repeats,
)

__all__ = [
    "CONJ", "DTYPES", "INFERENCE", "NEG", "NO_GRAD", "Strides", "contiguous_strides", "decode", "describe",
    "distinct", "encode", "extent_of", "first_line", "fresh", "joined", "memory", "pack", "rebuild", "repeats",
    "without_frames",
]  # fmt: skip
