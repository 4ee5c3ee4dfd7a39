"""Turns the compatibility mode on and off, and hands it down to the processes that this one starts.

A forked child has it as its parent has. Any other Python process reads PYTHONPATH, where `boot/sitecustomize.py` waits
until that process imports torch.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

from telegrad.compat.imports import after_import, forget_import
from telegrad.errors import UsageError
from telegrad.version import VERSION

if TYPE_CHECKING:
    from telegrad.compat.substitution import Substitution

BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")
VARIABLE = "PYTHONPATH"

log = logging.getLogger("telegrad")

_lock = threading.Lock()  # guards _substitution
_substitution: Substitution | None = None


def install() -> None:
    """Have `torch.distributed.rpc` and what belongs to it be Telegrad's, here and in all processes started from now on.

    Names that were imported before are changed too. Does nothing where it is so already. Once the process has joined a
    group, it is too late.

    Raises:
        UsageError: this process is a worker of a group.
    """
    if _substitute():
        os.environ[VARIABLE] = os.pathsep.join([BOOT, *_other_paths()])
        log.info("telegrad %s serves torch.distributed.rpc in this process and those that it starts", VERSION)


def uninstall() -> None:
    """Undo `install`: torch's own modules are back, and every name that was changed.

    Raises:
        UsageError: this process is a worker of a group.
    """
    global _substitution
    with _lock:
        if _substitution is not None:
            _check_free()
            _substitution.undo()
            _substitution = None
    if VARIABLE in os.environ:
        os.environ[VARIABLE] = os.pathsep.join(_other_paths())
        if not os.environ[VARIABLE]:
            del os.environ[VARIABLE]


def _other_paths() -> list[str]:
    """What the user's environment has there."""
    return [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path not in ("", BOOT)]


def _check_free() -> None:
    """What is called in a group must be what has joined it."""
    ours = sys.modules.get("telegrad.rpc.current")
    theirs = sys.modules.get("torch.distributed.rpc")
    if (ours and ours.worker) or (hasattr(theirs, "rpc_sync") and theirs._is_current_rpc_agent_set()):  # type: ignore[union-attr]
        raise UsageError(
            "this process is in a group already: turn the compatibility mode on or off outside of it, "
            "before init_rpc or after shutdown"
        )


def installed() -> bool:
    """Whether the compatibility mode is on in this process."""
    return _substitution is not None


def inherit() -> None:
    """In a process that was started by one in the mode: turn it on as soon as torch is imported."""
    if "torch" in sys.modules:
        _substitute()
    else:
        after_import("torch", lambda _: _inherited())


def _inherited() -> None:
    forget_import("torch")
    _substitute()
    gc.freeze()  # torch stays: the collector need not look through it again and again, and once more at the exit


def _substitute() -> bool:
    """Whether it was not so before."""
    global _substitution
    with _lock:
        if _substitution is not None:
            return False
        _check_free()
        from telegrad.compat.places import substitution

        _substitution = substitution()
        return True
