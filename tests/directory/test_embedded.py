"""The embedded directory: as a process that a keeper starts, and as a thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from telegrad.directory.client import EmbeddedDirectory
from telegrad.directory.keeper import Keeper
from telegrad.directory.table import Limits
from tests.cluster import KEYS
from tests.directory.contract import Contract
from tests.directory.faults import Faults
from tests.directory.programs import Programs

CHANGES = 4000  # that the tests' server remembers


class ProcessEngine:
    """An engine of the contract: a process of its own."""

    ttl, slack, survives = 0.3, 0.3, True

    def __init__(self) -> None:
        self.keeper = Keeper(KEYS, limits=Limits(changes=CHANGES))

    def client(self, patience: float = 10.0) -> EmbeddedDirectory:
        return EmbeddedDirectory(self.keeper.address, KEYS, patience)

    def kill(self) -> None:
        os.kill(self.keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.keeper.pid, os.WEXITED | os.WNOWAIT)

    def start(self) -> None:
        assert self.keeper.restart_if_ended()

    def pause(self) -> None:
        os.kill(self.keeper.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.keeper.pid, signal.SIGCONT)

    def forget(self) -> None:
        client = self.client()
        revision = 0
        for _ in range(CHANGES + 1):
            revision = client.swap("filler", b"", revision).entry.revision
        client.swap("filler", None, revision)
        client.close()


class TestProcess(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[ProcessEngine]:
        kept = ProcessEngine()
        yield kept
        kept.keeper.close()
