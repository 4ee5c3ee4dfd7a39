"""Tests of the single owner of a published value, in all kinds of groups: kills, stops, failures of the directory."""

import contextlib
import json
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.membership import form_generations
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.registry import Claim, Registry
from telegrad._core.stores.directory import DirectoryLost, DirectoryRefused
from telegrad._core.stores.find_directory import DirectoryMonitor
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.publishing import registration as registering
from telegrad.publishing.published import Publications
from tests.cluster import PATIENCE, Process, agents, processes, run_all, takes_less_than, wait_until
from tests.rpc.members import Counter
from tests.rpc.test_publishing import on

KINDS = ["fixed", pytest.param("dynamic", marks=pytest.mark.nightly), "elastic"]
# Waits of several seconds: the other kind of group each night.
SLOW = ["fixed", pytest.param("dynamic", marks=pytest.mark.nightly)]
STOPPED = 2.0  # seconds of a lease


class Value:
    """A value that records in a file when it is made or used, by which worker and with which token."""

    def __init__(self, path: str) -> None:
        self.path, self.count = path, 0
        self.note("made")

    def note(self, what: str) -> None:
        owned = offers_of(current.here())._offers["value"].owned
        assert owned is not None
        line = json.dumps([time.monotonic(), what, current.here().me.name, owned.claim.token])
        with open(self.path, "a") as file:  # one write, which is appended as a whole
            file.write(line + "\n")

    def act(self) -> int:
        self.note("act")
        self.count += 1
        return self.count


class Noted(list[Any]):
    """The records of the file, by their times."""

    def __init__(self, path: pathlib.Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        super().__init__(sorted(map(json.loads, lines)))

    def makers(self) -> list[str]:
        return [name for _, what, name, _ in self if what == "made"]

    def check(self) -> None:
        """Check that tokens never decrease, and that each belongs to one worker."""
        tokens = [token for *_, token in self]
        assert tokens == sorted(tokens), list(self)
        assert len({(name, token) for *_, name, token in self}) == len(set(tokens)), list(self)


def offers_of(worker: Worker) -> Publications:
    return worker.attached(Publications)


def take_part(number: int, url: str, kind: str, silence: float) -> None:
    form_generations.LAST_CALL = 0.3
    options = rpc.TelegradOptions(init_method=url, rpc_timeout=PATIENCE, silence=silence)
    size: dict[str, Any] = {"fixed": {"world_size": 3}, "dynamic": {}, "elastic": {"min_workers": 3, "max_workers": 3}}
    rpc.init_rpc(f"w{number}", rank=-1 if kind == "elastic" else number, rpc_backend_options=options, **size[kind])


def take_part_all(group: list[Process], kind: str, folder: pathlib.Path, silence: float = 10.0) -> list[Process]:
    """Join; return the processes by their ranks."""
    run_all(group, take_part, f"file://{folder}/store", kind, silence)
    return sorted(group, key=lambda process: int(process.run(rank_here)))


def rank_here() -> int:
    return current.here().me.id


def publish(path: str) -> None:
    rpc.publish("value", partial(Value, path))


def publish_alone(path: str) -> None:
    """Publish once the losses of all others have been reported; this worker has not stood by before."""
    wait_until(lambda: len(current.here().membership.present()) == 1)
    publish(path)


found: list[rpc.RRef[Any]] = []


def find_and_act() -> int:
    found[:] = [rpc.lookup("value")]
    return int(found[0].rpc_sync().act())


def act_until_it_works() -> int:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return int(found[0].rpc_sync(timeout=5).act())
        except (errors.PeerError, errors.CallTimeout):  # the call began before the end of the owner was known
            assert time.monotonic() < until


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_owner_is_replaced_at_once(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "notes"
    with processes(3) as group:
        user, owner, spare = take_part_all(group, kind, tmp_path)
        owner.run(publish, str(path))
        spare.run(publish, str(path))
        assert user.run(find_and_act) == 1
        with takes_less_than(8):  # each lease has 10 s
            owner.kill()
            assert user.run(act_until_it_works) == 1
            spare.kill()
            user.run(publish_alone, str(path))
            assert user.run(act_until_it_works) == 1
        noted = Noted(path)
    noted.check()
    assert len(noted.makers()) == len(set(noted.makers())) == 3


def act_and_stop(path: str) -> list[str]:
    """Use the own value, stop this process, and use the value for 1 s after it resumes; return the errors."""
    own = rpc.lookup("value")
    for _ in range(5):
        own.rpc_sync().act()
    signal.raise_signal(signal.SIGSTOP)
    refused = []
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            own.local_value().act()
        except errors.TelegradError as error:
            refused.append(type(error).__name__)
    return refused


@pytest.mark.parametrize("kind", [*SLOW, pytest.param("elastic", marks=pytest.mark.nightly)])
def test_an_owner_that_was_stopped_beyond_its_lease_refuses(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "notes"
    with processes(3) as group:
        user, owner, spare = take_part_all(group, kind, tmp_path, STOPPED)
        owner.run(publish, str(path))
        spare.run(publish, str(path))
        assert user.run(find_and_act) == 1
        owner.begin(act_and_stop, str(path))
        wait_until(lambda: len(Noted(path).makers()) == 2)
        assert user.run(act_until_it_works) == 1
        owner.kill(signal.SIGCONT)
        refused = owner.end()
        assert user.run(act_until_it_works) == 2
        noted = Noted(path)  # before the owner is killed at the end of the test
    noted.check()
    assert len(noted.makers()) == 2
    assert "ClaimLost" in refused


def go_on(_: int) -> int:
    """Go to the next generation of an elastic group; return its size."""
    while True:
        try:
            now = rpc.rendezvous_again()
        except errors.PeerError:
            continue
        if now.number > 1:
            return int(now.size)


def test_the_next_generation_of_an_elastic_group_publishes_anew(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes"
    with processes(3) as group:
        run_all(group, join_elastic, f"file://{tmp_path}/store")
        keeper, owner, spare = sorted(group, key=lambda process: int(process.run(rank_here)))
        owner.run(publish, str(path))
        assert spare.run(find_and_act) == 1
        keeper.kill()  # with the directory of the first generation
        assert run_all([owner, spare], go_on) == [2, 2]
        spare.run(publish, str(path))
        assert owner.run(find_and_act) == 1
        noted = Noted(path)
    assert len(noted.makers()) == 2


def join_elastic(number: int, url: str) -> None:
    form_generations.LAST_CALL = PATIENCE
    options = rpc.TelegradOptions(init_method=url, rpc_timeout=PATIENCE)
    rpc.init_rpc(f"w{number}", min_workers=2, max_workers=3, rpc_backend_options=options)
    rpc.rendezvous_again()


# In this process


def group(kind: str, count: int = 3, **options: Any) -> contextlib.AbstractContextManager[list[Worker]]:
    return agents(count, dynamic=kind == "dynamic", **options)


def registration(worker: Worker) -> DynamicGroup:
    return offers_of(worker).registration.group(PATIENCE)


def server_of(workers: list[Worker]) -> int:
    """Return the process id of the directory, which one of the workers keeps."""
    for worker in workers:
        directory = worker.directory
        keeping = directory._keeping if isinstance(directory, DynamicGroup) else offers_of(worker).registration._keeping
        if keeping is not None:
            return keeping._keeper.pid
    raise AssertionError("there is none")


def leave(workers: list[Worker], rank: int) -> None:
    """Have a worker leave, and wait until all others have noticed."""
    others = [worker for worker in workers if worker.me.id != rank]
    for worker in others:
        worker.membership.on_leave(lambda *_: None)
    for worker in others:
        assert on(worker, rpc.rpc_sync, f"w{rank}", pow, (2, 3)) == 8
    workers[rank].end("")
    wait_until(lambda: all(len(worker.membership.present()) == len(others) for worker in others))


TWO = ["fixed", "dynamic"]


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Make three workers, the second of which publishes a counter; a test may choose the kind of their group."""
    with group(getattr(request, "param", "fixed")) as made:
        on(made[1], rpc.publish, "counter", Counter)
        yield made


@pytest.mark.parametrize("kind", TWO)
def test_only_one_of_several_workers_that_publish_makes_the_value(kind: str) -> None:
    with group(kind, 5) as workers:
        ready = threading.Barrier(5)
        made: list[str] = []

        def publish(worker: Worker) -> None:
            current.enter(worker)
            ready.wait(PATIENCE)
            rpc.publish("one", lambda: made.append(worker.me.name))

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(publish, workers))
        owners = [on(worker, lambda: rpc.lookup("one").owner_name()) for worker in workers]
        assert (len(made), set(owners)) == (1, {made[0]})


@pytest.mark.parametrize("workers", SLOW, indirect=True)
def test_an_owner_refuses_until_its_lease_is_renewed(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    found = on(workers[0], rpc.lookup, "counter")
    assert on(workers[0], lambda: found.rpc_sync().add()) == 1
    at_owner = on(workers[1], rpc.lookup, "counter")
    own = registration(workers[1])
    monkeypatch.setattr(own.directory, "renew", Mock(side_effect=DirectoryLost("not now")))
    own._lease = own._lease._replace(ends=0.0)
    for use in (
        lambda: found.rpc_sync(0.3).add(),
        lambda: found.to_here(0.3),
        lambda: rpc.rpc_sync("w2", add_by, (found, 0.3)),
    ):
        with pytest.raises(errors.ClaimLost, match="'w1' refuses calls to the value 'counter'"):
            on(workers[0], use)
    with pytest.raises(errors.ClaimLost):
        on(workers[1], at_owner.local_value)
    with pytest.raises(errors.NotPublished, match="'w1' refuses calls"):
        on(workers[2], rpc.lookup, "counter", 0.3)
    threading.Timer(0.2, monkeypatch.undo).start()
    assert on(workers[0], lambda: found.rpc_sync().add()) == 2  # waits for the lease


def add_by(reference: rpc.RRef[Counter], timeout: float) -> int:
    return reference.rpc_sync(timeout).add()


@pytest.mark.parametrize("workers", TWO, indirect=True)
def test_a_directory_that_is_killed_comes_back_with_the_claims(workers: list[Worker]) -> None:
    on(workers[2], rpc.publish, "counter", pytest.fail)
    found = on(workers[0], rpc.lookup, "counter")
    before = server_of(workers)
    os.kill(before, signal.SIGKILL)
    assert on(workers[0], lambda: found.rpc_sync().add()) == 1
    on(workers[2], rpc.publish, "another", Counter)
    assert on(workers[1], lambda: rpc.lookup("another").rpc_sync().add()) == 1
    assert on(workers[2], lambda: rpc.lookup("counter").rpc_sync().add()) == 2
    assert server_of(workers) != before


@pytest.mark.parametrize("kind", SLOW)
def test_known_values_are_served_while_the_directory_does_not_answer(kind: str) -> None:
    with group(kind, rpc_timeout=4.0, silence=5.0) as workers:
        on(workers[1], rpc.publish, "counter", Counter)
        found = on(workers[0], rpc.lookup, "counter")
        server = server_of(workers)
        os.kill(server, signal.SIGSTOP)
        try:
            assert on(workers[0], lambda: found.rpc_sync().add()) == 1
            assert on(workers[0], lambda: rpc.lookup("counter").rpc_sync().add()) == 2
            told = r"'nothing' is not available after 2.5 s: the directory"
            with takes_less_than(4), pytest.raises(errors.RendezvousError, match=told):
                on(workers[0], rpc.lookup, "nothing", 2.5)
            told = r"publish\('other'\): the directory has not confirmed"
            with takes_less_than(6), pytest.raises(errors.RendezvousError, match=told):
                on(workers[2], rpc.publish, "other", pytest.fail)
            wait_until(lambda: not registration(workers[1]).holds)
            with pytest.raises(errors.ClaimLost):
                on(workers[0], lambda: found.rpc_sync(0.3).add())
        finally:
            os.kill(server, signal.SIGCONT)
        wait_until(lambda: registration(workers[1]).holds)
        assert on(workers[0], lambda: found.rpc_sync().add()) == 3
        on(workers[2], rpc.publish, "other", Counter)  # the claim that timed out was given up
        assert on(workers[0], lambda: rpc.lookup("other").owner_name()) == "w2"


def test_a_worker_that_was_declared_lost_registers_and_claims_again(workers: list[Worker]) -> None:
    found = on(workers[0], rpc.lookup, "counter")
    assert on(workers[0], lambda: found.rpc_sync().add()) == 1
    lost = registration(workers[1])
    registration(workers[0]).declare_lost(workers[1].me, "a test")
    wait_until(lambda: registration(workers[1]) is not lost)
    wait_until(lambda: on(workers[0], add_if_possible, found) == 1)
    offers_of(workers[1])._lose_all(lost)  # as if the value had been claimed again before
    assert on(workers[0], lambda: found.rpc_sync().add()) == 2
    with pytest.raises(errors.ClaimLost, match=r"owned 'counter' with the token|refuses"):
        offers_of(workers[1]).value("counter", 1 << 40)


def test_a_later_claim_drops_the_value_of_an_earlier_one(workers: list[Worker]) -> None:
    own = offers_of(workers[1])
    offer = own._offers["counter"]
    assert offer.owned is not None
    assert not own._take(offer, offer.owned)
    assert own._take(offer, offer.owned._replace(claim=Claim(offer.owned.claim.life, 1 << 40)))
    assert offer.value is None


def add_if_possible(reference: rpc.RRef[Counter]) -> int:
    try:
        return reference.rpc_sync().add()
    except errors.PeerError:
        return 0


@pytest.mark.parametrize("workers", TWO, indirect=True)
def test_an_owner_refuses_a_caller_that_knows_a_higher_token(workers: list[Worker]) -> None:
    own = offers_of(workers[1])
    claim = registration(workers[1]).claims["counter"]
    assert own.value("counter", claim.token)[0] == claim.token
    with pytest.raises(errors.ClaimLost, match=f"with the token {claim.token}, but another worker owns it with"):
        own.value("counter", claim.token + 1)


def test_a_claim_that_was_given_up_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    release = Registry.release

    def release_late(self: Registry, name: str, claim: Claim) -> None:
        is_first = not begun.is_set()
        begun.set()
        assert not is_first or may_go_on.wait(PATIENCE)
        release(self, name, claim)
        if is_first:
            ended.set()

    with group("fixed") as workers:
        monkeypatch.setattr(Registry, "release", release_late)
        with pytest.raises(ArithmeticError):
            on(workers[1], rpc.publish, "counter", Mock(side_effect=ArithmeticError("no value today")))
        assert begun.wait(PATIENCE)
        on(workers[1], rpc.publish, "counter", Counter)
        assert on(workers[1], lambda: rpc.lookup("counter").rpc_sync().add()) == 1
        may_go_on.set()
        assert ended.wait(PATIENCE)
        registration(workers[1]).refresh()
        assert on(workers[1], lambda: rpc.lookup("counter").rpc_sync().add()) == 2


def test_a_reference_is_not_used_once_a_later_token_is_known(workers: list[Worker]) -> None:
    found = on(workers[0], rpc.lookup, "counter")
    own = registration(workers[0])
    claim = own.claims["counter"]
    own.claims["counter"] = claim._replace(token=claim.token + 1)
    with pytest.raises(errors.OwnerLost, match="now has another owner"):
        on(workers[0], found._strategy.check)
    own.claims["counter"] = claim
    assert on(workers[0], lambda: found.rpc_sync().add()) == 1


def test_publish_and_lookup_fail_if_rank_0_left_before_the_first_use() -> None:
    with group("fixed") as workers:
        leave(workers, 0)
        with takes_less_than(10):
            for worker, act in (
                (workers[1], partial(rpc.publish, "counter", Counter)),
                (workers[2], partial(rpc.lookup, "counter")),
            ):
                with pytest.raises(errors.PeerLost, match="the worker of rank 0, which keeps the directory"):
                    on(worker, act)


def test_other_workers_tell_the_address_of_the_directory_without_rank_0() -> None:
    with group("fixed") as workers:
        on(workers[2], rpc.publish, "counter", Counter)
        server = server_of(workers)
        leave(workers, 0)
        assert on(workers[1], lambda: rpc.lookup("counter").rpc_sync().add()) == 1
        os.kill(server, 0)  # it runs
    wait_until(lambda: not runs(server))


@pytest.mark.parametrize("kind", TWO)
def test_the_process_of_the_directory_ends_with_the_group(kind: str) -> None:
    with group(kind) as workers:
        on(workers[1], rpc.publish, "counter", Counter)
        server = server_of(workers)
        assert runs(server)
    with takes_less_than(6):  # else it has waited for the end of a lease
        wait_until(lambda: not runs(server))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_group_that_publishes_nothing_has_no_directory() -> None:
    with group("fixed") as workers:
        assert on(workers[0], rpc.rpc_sync, "w1", pow, (2, 3)) == 8
        assert not any(Publications in worker._attached for worker in workers)


def test_the_directory_is_started_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock(wraps=DirectoryMonitor)
    monkeypatch.setattr(registering, "DirectoryMonitor", start)
    with group("fixed", 5) as workers:
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda worker: on(worker, rpc.publish, "one", Counter), workers))
        assert start.call_count == 1


def test_publish_raises_if_the_directory_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with group("fixed", 2) as workers:
        fail = Mock(side_effect=errors.StoreUnreachable("no process today"))
        monkeypatch.setattr(registering, "DirectoryMonitor", fail)
        for worker in workers:
            with pytest.raises(errors.RendezvousError, match="no process today"):
                on(worker, rpc.publish, "counter", Counter)
        monkeypatch.undo()
        on(workers[1], rpc.publish, "counter", Counter)


# Errors and log lines of owners that refuse


@pytest.mark.parametrize("workers", ["fixed", "dynamic"], indirect=True)
def test_an_owner_that_waits_for_its_lease_logs_no_refused_lookups(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    owner = registration(workers[1])
    on(workers[0], rpc.lookup, "counter")
    asked = Mock(wraps=offers_of(workers[1]).value)
    monkeypatch.setattr(offers_of(workers[1]), "value", asked)
    monkeypatch.setattr(DynamicGroup, "holds", property(lambda self: self is not owner))
    with pytest.raises(errors.NotPublished, match="did not renew its lease in the directory in time"):
        on(workers[0], rpc.lookup, "counter", 1.0)
    assert asked.call_count > 3
    assert not [record for record in caplog.records if "lookup" in record.getMessage()]


@pytest.mark.parametrize(
    ("workers", "says"),
    [("fixed", "may own the value now. The call"), ("dynamic", "Start it again")],
    indirect=["workers"],
)
def test_the_advice_to_start_a_worker_again_is_for_dynamic_groups_only(workers: list[Worker], says: str) -> None:
    owned = offers_of(workers[1])._offers["counter"].owned
    assert owned is not None
    over, owned.group.over = owned.group.over, "worker 'w1' was declared lost (a test). Start it again"
    with pytest.raises(errors.ClaimLost, match=says) as caught:
        on(workers[1], owned.check)
    owned.group.over = over
    assert ("Start it again" in str(caught.value)) == (says == "Start it again")


def test_the_error_of_a_lookup_has_the_given_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    find = registering.Registration._find

    def find_late(self: registering.Registration) -> registering.Address:
        threading.Event().wait(0.3)
        return find(self)

    monkeypatch.setattr(registering.Registration, "_find", find_late)
    with group("fixed") as workers:
        on(workers[1], rpc.publish, "counter", Counter)  # starts the directory
        with pytest.raises(errors.NotPublished, match=r"'nothing' is not available after 1 s: no worker"):
            on(workers[0], rpc.lookup, "nothing", 1.0)


@pytest.mark.parametrize("error", [DirectoryRefused, pytest.param(errors.StoreUntrusted, marks=pytest.mark.nightly)])
def test_publish_and_lookup_raise_the_error_of_the_directory(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A standby repeats its claim until the directory answers."""
    with group("dynamic") as workers:
        on(workers[1], rpc.publish, "counter", Counter)
        on(workers[2], rpc.publish, "counter", Counter)
        refused: list[str] = []

        def refuse(self: DynamicGroup, name: str) -> None:
            refused.append(name)
            raise error("as it says")

        with monkeypatch.context() as patch:
            patch.setattr(DynamicGroup, "claim", refuse)
            patch.setattr(DynamicGroup, "look_for_owner", refuse)
            with pytest.raises(error, match="as it says"):
                on(workers[0], rpc.publish, "new", Counter)
            with pytest.raises(error, match=r"'nothing' is not available after 0\.5 s: as it says"):
                on(workers[0], rpc.lookup, "nothing", 0.5)
            offers_of(workers[1])._withdraw(offers_of(workers[1])._offers["counter"])
            wait_until(lambda: refused.count("counter") > 3)
        assert on(workers[0], lambda: rpc.lookup("counter").owner_name()) == "w2"
        wait_until(lambda: not offers_of(workers[2])._offers["counter"].is_busy)
        told = [record for record in caplog.records if "cannot be claimed here yet: as it says" in record.getMessage()]
        assert len(told) == 1
        assert not [record for record in caplog.records if record.exc_info]


def test_a_lookup_in_the_pause_after_an_answer_does_not_count_as_an_unanswered_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    with agents(1, dynamic=True) as (worker,):
        registration = registering.Registration(worker, lambda: None, lambda _: None, lambda _: None)
        monkeypatch.setattr(registering, "monotonic", lambda: now)
        monkeypatch.setattr(registering, "run_in_thread", lambda _, function, *args: function(*args))
        monkeypatch.setattr(registering, "sleep", lambda _: registration.check_directory("value"))
        registration.check_directory("value")
        now = 200.0
        registration.check_directory("value")
