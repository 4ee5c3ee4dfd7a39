"""What the owner of a published value says that must not act, and what its callers and the logs are told."""

from __future__ import annotations

import logging
import threading

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.directory.directory import DirectoryRefused
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad.publishing import registration as registering
from tests.cluster import wait_until
from tests.rpc.test_owners import Counter, group, offers_of, on, registration


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_an_owner_that_waits_for_its_lease_refuses_without_lines_in_the_log(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with group(kind) as workers:
        on(workers[1], rpc.publish, "counter", Counter)
        owner = registration(workers[1])
        on(workers[0], rpc.lookup, "counter")
        asked: list[str] = []
        value = type(offers_of(workers[1])).value

        def counted(self: object, name: str, token: int) -> object:
            asked.append(name)
            return value(self, name, token)  # type: ignore[arg-type]

        monkeypatch.setattr(type(offers_of(workers[1])), "value", counted)
        monkeypatch.setattr(DynamicGroup, "holds", property(lambda self: self is not owner))
        with pytest.raises(errors.NotPublished, match="did not renew its lease in the group's directory in time"):
            on(workers[0], rpc.lookup, "counter", 1.0)
        assert len(asked) > 3
        assert not [record for record in caplog.records if "lookup" in record.getMessage()]


@pytest.mark.parametrize(
    ("kind", "says"), [("fixed", "may own the value now. The call"), ("dynamic", "Start it again")]
)
def test_only_a_worker_that_has_no_group_any_more_is_to_be_started_anew(kind: str, says: str) -> None:
    with group(kind) as workers:
        on(workers[1], rpc.publish, "counter", Counter)
        owned = offers_of(workers[1])._offers["counter"].owned
        assert owned is not None
        over, owned.group.over = owned.group.over, "worker 'w1' was declared lost (a test). Start it again"
        with pytest.raises(errors.ClaimLost, match=says) as caught:
            on(workers[1], owned.check)
        owned.group.over = over
        assert ("Start it again" in str(caught.value)) == (kind == "dynamic")


def test_a_lookup_says_the_timeout_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    find = registering.Registration._find

    def find_late(self: registering.Registration) -> registering.Address:
        threading.Event().wait(0.3)
        return find(self)

    monkeypatch.setattr(registering.Registration, "_find", find_late)
    with (
        group("fixed") as workers,
        pytest.raises(errors.NotPublished, match=r"'nothing' is not available after 1 s: no worker"),
    ):
        on(workers[0], rpc.lookup, "nothing", 1.0)


@pytest.mark.parametrize("error", [DirectoryRefused, errors.StoreUntrusted])
def test_a_directory_that_refuses_is_told_to_those_that_ask(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that stands by asks until it is answered."""
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
            with pytest.raises(error, match=r"'nothing' is not available after 2 s: as it says"):
                on(workers[0], rpc.lookup, "nothing", 2.0)
            offers_of(workers[1])._withdraw(offers_of(workers[1])._offers["counter"])
            wait_until(lambda: refused.count("counter") > 3)
        assert on(workers[0], lambda: rpc.lookup("counter").owner_name()) == "w2"
        wait_until(lambda: not offers_of(workers[2])._offers["counter"].is_busy)
        told = [record for record in caplog.records if "cannot be claimed here yet: as it says" in record.getMessage()]
        assert len(told) == 1
        assert not [record for record in caplog.records if record.exc_info]
