"""The contract, for the model and for each engine. `test_etcd_cluster.py` has etcd with three members."""

from collections.abc import Iterator

import pytest

from tests.directory.contract import Contract
from tests.directory.engines import ProcessEngine
from tests.directory.etcd_servers import Cluster, needs_etcd
from tests.directory.faults import Faults
from tests.directory.naive import NaiveEngine
from tests.directory.programs import Programs
from tests.directory.redis_server import NEEDED, Server, running

# Its leases last 2 s or longer. The other engines run these tests each time.
LONG_LEASES = {
    "test_the_next_owner_comes_after_the_end_of_the_lease",
    "test_a_lease_also_ends_after_a_restart_of_its_server",
    "test_owners_do_not_act_at_once",
    "test_owners_do_not_act_at_once_while_the_server_fails",
    "test_each_write_is_done_once_while_the_server_fails[kill-3]",
}

# Owners that act while the server fails renew their leases, too.
REPEATED = ("test_renewals_keep_a_lease", "test_owners_do_not_act_at_once")


@pytest.mark.nightly
class TestNaive(Contract, Programs, Faults):
    """The model of the simulations, which contains no code of the package."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> NaiveEngine:
        return NaiveEngine()


class TestProcess(Contract, Programs, Faults):
    nightly = REPEATED

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[ProcessEngine]:
        kept = ProcessEngine()
        yield kept
        kept.keeper.close()


@needs_etcd
class TestEtcd(Contract, Programs, Faults):
    nightly = LONG_LEASES

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        cluster = Cluster(tmp_path_factory.mktemp("etcd"))
        cluster.leader()
        yield cluster
        cluster.close()


@NEEDED
class TestRedis(Contract, Programs, Faults):
    nightly = ("test_owners_do_not_act_at_once_while_the_server_fails", *REPEATED[:1])

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(tmp_path_factory.mktemp("redis")) as server:
            yield server
