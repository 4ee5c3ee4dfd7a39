"""Run programs written for `torch.distributed.rpc` on Telegrad: `install()`, or `python -m telegrad script.py`.

This file does not import torch, because it runs at the start of every process that inherits the mode. The mode may be
turned on before torch is imported; it then takes effect at the end of that import. A forked child inherits its parent's
mode. Any other Python process reads PYTHONPATH, where `boot/sitecustomize.py` turns the mode on at the start.

Lock order: the thread that imports torch reaches this file while it holds torch's import lock. So the lock of this file
is never held while modules of Telegrad are imported, and torch is imported before them.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from telegrad._core.pickling import main_program as programs
from telegrad._core.texts import NOT_USERS
from telegrad.compat.substitution import after_import, forget_import, import_before
from telegrad.errors import UsageError
from telegrad.version import VERSION

if TYPE_CHECKING:
    from telegrad.compat.substitution import Substitution

__all__ = ["install", "installed", "uninstall"]

BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")
VARIABLE = "PYTHONPATH"
OF_EXTENSIONS = tuple(f"ext.{name}" for name in ("calls", "graphs", "modules", "values", "workers"))
# The packages that import torch. The act that follows torch's import needs all of them, none of them half imported.
WITH_TORCH = ("autograd", "checkpoint", "nn", "optim", "rpc", "weights", *OF_EXTENSIONS)

log = logging.getLogger("telegrad")

_lock = threading.RLock()  # guards _Mode and the environment variable; `installed` reads _Mode.on without it


class _Mode:
    on = False
    substitution: Substitution | None = None  # the modules that replace torch's; None before torch is imported


if hasattr(os, "register_at_fork"):  # a child must not be forked in the middle of a change
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def install() -> None:
    """Replace `torch.distributed.rpc` and related modules with Telegrad's, here and in all processes started later.

    Names that were imported before are replaced too. If torch is not imported yet, this happens when it is. Do nothing
    if the mode is on already. It must be turned on before the process joins a group.

    Raises:
        UsageError: this process is a worker of a group, or torch was built without `torch.distributed`.

    Example:
        >>> from telegrad import compat
        >>> compat.install()
        >>> from torch.distributed.rpc import RRef
        >>> issubclass(RRef, telegrad.rpc.RRef)
        True
        >>> compat.uninstall()
    """
    with _lock:
        was_on = _Mode.on
        if not was_on:
            _check_free()
            _Mode.on = programs.serves_torch = True
            after_import("torch", _begin_with_torch)
            import_before("torch", [f"telegrad.{name}" for name in WITH_TORCH])
        _set_paths([BOOT, *_other_paths(os.environ)])
    # This is not done under the lock, because it imports modules of Telegrad. Without torch and without other threads
    # there is nothing to do, and the hook of torch's import takes effect later. Another thread may be in the middle of
    # that import, which began without the hook: then this thread waits for its end.
    if "torch" in sys.modules or threading.active_count() > 1:
        try:
            _take_effect()
        except UsageError:
            uninstall()
            raise
    if not was_on:
        log.info("telegrad %s serves torch.distributed.rpc in this process and those that it starts", VERSION)


def uninstall() -> None:
    """Undo `install`: restore torch's own modules and every changed name.

    Raises:
        UsageError: this process is a worker of a group.

    Example:
        >>> from telegrad import compat
        >>> compat.install()
        >>> compat.uninstall()
        >>> compat.installed()
        False
    """
    with _lock:
        if _Mode.substitution is not None:
            _check_free()
            _Mode.substitution.undo()
        forget_import("torch")
        _Mode.on = programs.serves_torch = False
        _Mode.substitution = None
        _set_paths(_other_paths(os.environ))


def installed() -> bool:
    """Return True if the compatibility mode is on in this process.

    Example:
        >>> from telegrad import compat
        >>> compat.installed()
        False
    """
    return _Mode.on


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for each Python process that Telegrad starts, with the mode if it is on here."""
    environment = dict(variables)
    if _Mode.on:
        environment[VARIABLE] = os.pathsep.join([BOOT, *_other_paths(variables)])
    return environment


def _begin_with_torch(_: object) -> None:
    _take_effect()
    # torch's objects stay until the end. Without this, the collector would scan them again and again, also at exit:
    # that took a quarter of the processor time of a short program. This is done only if the mode was on before torch
    # was imported, when the program has few objects of its own that would be kept as well.
    # The program's objects must be freed at the exit, which closes files. This list is never freed, and keeps the
    # program's modules: the interpreter empties each module that exists until the end.
    kept: list[object] = [module for name, module in sys.modules.items() if name.partition(".")[0] not in NOT_USERS]
    kept.append(kept)
    gc.freeze()


def _take_effect() -> None:
    """Apply the mode once torch is imported; wait if another thread is importing it."""
    import_module("torch")
    substitution = import_module("telegrad.compat.places").substitution()
    with _lock:
        # The imports above ran without the lock: meanwhile another thread may have taken effect, or turned the mode
        # off.
        if _Mode.on and _Mode.substitution is None:
            _check_free()
            forget_import("torch")
            _Mode.substitution = substitution
            substitution.take_effect()


def _other_paths(variables: Mapping[str, str]) -> list[str]:
    """Return the user's entries of PYTHONPATH."""
    return [path for path in variables.get(VARIABLE, "").split(os.pathsep) if path not in ("", BOOT)]


def _set_paths(paths: list[str]) -> None:
    if paths:
        os.environ[VARIABLE] = os.pathsep.join(paths)
    else:
        os.environ.pop(VARIABLE, None)


def _check_free() -> None:
    """Raise UsageError if this process is in a group: its calls must use the implementation that joined the group."""
    ours = sys.modules.get("telegrad._core.worker.current")
    theirs = sys.modules.get("torch.distributed.rpc")
    if getattr(ours, "worker", None) or (hasattr(theirs, "rpc_sync") and theirs._is_current_rpc_agent_set()):  # type: ignore[union-attr]
        raise UsageError(
            "this process is in a group already: turn the compatibility mode on or off outside of it, "
            "before init_rpc or after shutdown"
        )
