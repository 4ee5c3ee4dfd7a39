"""References to values on other workers: the tables that count them, and references whose values are restored."""

from telegrad._core.references import Id
from telegrad._core.references.handles import ValueSlot
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.rpc.restorable import RestorableRRef, Restore, check_restore, wait_for
from telegrad._core.rpc.rref import RRef
from telegrad._core.worker.value_access import EACH, Proxy, created, fetch, methods

__all__ = [
    "EACH", "Id", "Proxy", "RRef", "ReferenceTable", "RestorableRRef", "Restore", "ValueSlot",
    "check_restore", "created", "fetch", "methods", "wait_for",
]  # fmt: skip
