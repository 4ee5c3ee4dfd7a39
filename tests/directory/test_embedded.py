"""The embedded directory keeps the contract: as a process that a keeper starts, and as a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad._core.directory.lease_table import Limits
from tests.directory.contract import Contract
from tests.directory.engines import ProcessEngine, ThreadEngine
from tests.directory.faults import Faults
from tests.directory.programs import Programs


class TestProcess(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[ProcessEngine]:
        kept = ProcessEngine()
        yield kept
        kept.keeper.close()


class TestThread(Contract, Programs):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[ThreadEngine]:
        thread = ThreadEngine(limits=Limits(changes=2000))
        yield thread
        thread.close()
