"""etcd keeps the contract, alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.directory.contract import Contract
from tests.directory.etcd_servers import Cluster, needs_etcd
from tests.directory.faults import Faults
from tests.directory.programs import Programs


@needs_etcd
class TestOne(Contract, Programs, Faults):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        cluster = Cluster(tmp_path_factory.mktemp("etcd"))
        cluster.leader()
        yield cluster
        cluster.close()
