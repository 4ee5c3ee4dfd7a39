"""The contract's own test: the simplest directory keeps it."""

from __future__ import annotations

import pytest

from tests.directory.contract import Contract
from tests.directory.faults import Faults
from tests.directory.naive import NaiveEngine
from tests.directory.programs import Programs


class TestNaive(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> NaiveEngine:
        return NaiveEngine()
