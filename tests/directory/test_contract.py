"""The contract, for the model and for each engine. `test_etcd_cluster.py` has etcd with three members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad._core.directory.lease_table import Limits
from tests.directory.contract import Contract
from tests.directory.engines import ProcessEngine, ThreadEngine
from tests.directory.etcd_servers import Cluster, needs_etcd
from tests.directory.faults import Faults
from tests.directory.naive import NaiveEngine
from tests.directory.programs import Programs
from tests.directory.redis_server import NEEDED, Server, running


class TestNaive(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> NaiveEngine:
        return NaiveEngine()


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


@needs_etcd
class TestEtcd(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        cluster = Cluster(tmp_path_factory.mktemp("etcd"))
        cluster.leader()
        yield cluster
        cluster.close()


@NEEDED
class TestRedis(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(tmp_path_factory.mktemp("redis")) as server:
            yield server
