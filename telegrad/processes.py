"""What is common to those that start workers' processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def shared_cores(workers: int) -> dict[str, str]:
    """Variables for so many processes that share this host, unless they are set."""
    threads = max(1, (os.cpu_count() or 1) // max(1, workers))
    return {"OMP_NUM_THREADS": str(threads)}


def own_session() -> dict[str, Any]:
    """Ctrl-C in the terminal, or in a notebook, is for this process alone."""
    if os.name == "nt":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    return {"start_new_session": True}


def named(code: int) -> str:
    """How a process has ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
