"""Values, tensors and exceptions as bytes; references to values on other workers, also those that are restored."""

from telegrad._core.pickling.exceptions import describe, fresh, rebuild, without_frames
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.remote_text import first_line
from telegrad._core.references import Id
from telegrad._core.references.handles import ValueSlot
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.rpc.restorable import RestorableRRef, Restore, check_restore, wait_for
from telegrad._core.rpc.rref import RRef
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
from telegrad._core.worker.value_access import EACH, Proxy, created, fetch, methods

__all__ = [
    "CONJ", "DTYPES", "EACH", "INFERENCE", "NEG", "NO_GRAD", "Id", "Proxy", "RRef", "ReferenceTable", "RestorableRRef",
    "Restore", "Strides", "ValueSlot", "check_restore", "contiguous_strides", "created", "decode", "describe",
    "distinct", "encode", "extent_of", "fetch", "first_line", "fresh", "joined", "memory", "methods", "pack", "rebuild",
    "repeats", "wait_for", "without_frames",
]  # fmt: skip
