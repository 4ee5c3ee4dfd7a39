"""Dynamic groups on five hosts between which the network fails. `checker.py` has the rules that the records must keep.

`pytest -m nightly -s tests/partitions` prints the figures of each case.
"""

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from tests.cluster import processes
from tests.hosts import network
from tests.partitions import cases, member
from tests.partitions.cases import World
from tests.partitions.engines import APART, ENGINES, WORKERS

SILENCE, DEFAULT_SILENCE = 3.0, 10.0  # seconds, the option
DELAY = 2.0  # seconds between two answered calls; usually a tenth, but the machine may be busy
LOSSY = 8.0  # the same with a loss of every fifth packet: of 24000, one is lost seven times in a row
RESTART = 5.0  # seconds in which a killed server is back, and counts all leases anew

CASES = {
    "split for 5 s": (cases.split(5), DELAY, 0.0),
    "split for 30 s": (cases.split(30), DELAY, 0.0),
    "split for 90 s": (cases.split(90), DELAY, 0.0),
    "short splits": (cases.splits, DELAY, 0.0),
    "one-way cuts": (cases.one_way, DELAY, 0.0),
    "directory apart": (cases.directory_apart, DELAY, 0.0),
    "stopped for a moment": (cases.stopped(SILENCE / 3), DELAY, 0.0),
    "stopped": (cases.stopped(3 * SILENCE), DELAY, 0.0),
    "server killed": (cases.server_killed, DELAY, RESTART),
}

# Under such loss TCP takes up to a second until it sends a packet again, and 0.8% of the packets are lost three times
# in a row. A renewal has two thirds of the silence to arrive: two seconds are not enough for that, nearly seven are.
PATIENT = {
    "loss": (cases.loss(60), LOSSY),
    "split for 5 s": (cases.split(5), DELAY),
    "split for 30 s": (cases.split(30), DELAY),
}

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def world_on(engine: str, silence: float, folder: pathlib.Path) -> Iterator[World]:
    """Yield a group of five workers whose directory is of this kind."""
    kind = ENGINES[engine]
    if kind.missing:
        pytest.skip(kind.missing)
    with network(APART + 1, "nft") as hosts, processes(WORKERS) as group:
        directory = kind(hosts, folder)
        try:
            directory.start()
            for process, namespace in zip(group, hosts.namespaces[:WORKERS], strict=True):
                process.run(member.enter, namespace)
            world = World(hosts, directory, group, silence)
            yield world
            world.all_run(member.shut_down)
        finally:
            directory.stop()


@pytest.fixture(scope="module", params=ENGINES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_on(request.param, SILENCE, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_group_keeps_the_rules_despite_a_fault(world: World, name: str, tmp_path: pathlib.Path) -> None:
    case, delay, slack = CASES[name]
    assert cases.run(world, tmp_path, name, case, delay, slack) == []


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PATIENT)
def test_a_group_with_the_default_silence_keeps_the_rules(engine: str, name: str, tmp_path: pathlib.Path) -> None:
    case, delay = PATIENT[name]
    (records := tmp_path / "records").mkdir()
    with world_on(engine, DEFAULT_SILENCE, tmp_path) as made:
        assert cases.run(made, records, f"{engine}, {name}, default silence", case, delay, 0.0) == []


@pytest.mark.nightly
def test_a_group_keeps_the_rules_during_a_short_split(tmp_path: pathlib.Path) -> None:
    (records := tmp_path / "records").mkdir()
    with world_on("embedded", SILENCE, tmp_path) as made:
        assert cases.run(made, records, "short split", cases.split(4), DELAY, 0.0) == []
