"""References to values on other workers: the tables that count them, and references whose values are restored."""

from telegrad._core.references.box import SlotFilled, ValueSlot
from telegrad._core.references.letters import Id
from telegrad._core.references.table import ReferenceTable
from telegrad._core.rpc.references import Proxy, RRef
from telegrad._core.rpc.restorable import RestorableRRef, Restore, check_restore, wait_for
from telegrad._core.worker.values import fetch, methods

__all__ = [
    "Id",
    "Proxy",
    "RRef",
    "ReferenceTable",
    "RestorableRRef",
    "Restore",
    "SlotFilled",
    "ValueSlot",
    "check_restore",
    "fetch",
    "methods",
    "wait_for",
]
