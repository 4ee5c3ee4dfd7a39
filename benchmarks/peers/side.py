"""A peer's turn: its driver is a child process, which has the peer's other processes below it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import pathlib
import sys
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.groups import START_PATIENCE
from benchmarks.measuring import Row
from benchmarks.peers import rows
from benchmarks.processes import Child, Failed, answer_all

_LEAVE_PATIENCE = 20.0


class Named(NamedTuple):
    name: str
    package: str  # on the package index
    module: str  # of this folder


PEERS = [
    Named("Ray", "ray", "benchmarks.peers.ray_actor"),
    Named("Monarch", "torchmonarch", "benchmarks.peers.monarch_actor"),
]


class PeerSide:
    """Waits idle for its turn: unlike Telegrad's workers it is not stopped, since its processes watch each other."""

    def __init__(self, peer: Named) -> None:
        self._peer = peer
        self._child: Child | None = None
        self._cannot_run = ""

    def measure(self, row: Row) -> float:
        if self._cannot_run:
            raise Failed(self._cannot_run)
        if self._child is None:
            self._start()
        assert self._child is not None
        try:
            self._child.tell(row.name)
            return float(self._child.wait_answer(row.patience))
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        self._child = Child(drive, self._peer.module, fresh=True)
        try:
            self._child.wait_answer(START_PATIENCE)
        except Failed as failed:
            self.kill()
            self._cannot_run = f"not run: {failed}{why_not_installed(self._peer.package)}"
            raise Failed(self._cannot_run) from None
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        if self._child is not None:
            self._child.tell(None)
            self._child.join(_LEAVE_PATIENCE)
            self.kill()

    def kill(self) -> None:
        """The driver and all of its process group, where Ray's helpers stay when only the driver is killed."""
        if self._child is not None:
            self._child.kill_group()
            self._child = None


def drive(pipe: Connection, module: str) -> None:
    """Run rows by name, with the peer that the module starts."""
    os.setsid()
    try:
        peer = importlib.import_module(module).start()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    answer_all(pipe, lambda name: rows.measure(name, peer))
    peer.close()


def version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "not installed"


def why_not_installed(package: str) -> str:
    """What the installer said, where it failed; the environment keeps its log."""
    log = pathlib.Path(sys.prefix) / f"{package}.log"
    errors = [line for line in log.read_text().splitlines() if "ERROR" in line] if log.exists() else []
    return f" (pip: {errors[-1]})" if errors and version(package) == "not installed" else ""
