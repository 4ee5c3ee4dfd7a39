"""What several workers do at once, and what is said of it where it takes long."""

from __future__ import annotations

import threading
import time

import pytest

from telegrad._core import progress
from telegrad._core.rpc.joint_calls import call_all
from telegrad.errors import WorkersFailed
from telegrad.rpc import rpc_async
from tests.cluster import PATIENCE

WORKERS = {"w1": 1, "w2": 2, "w3": 3}
SIZES = {"w1": 2_000_000_000, "w2": 500_000_000, "w3": 500_000_000}

may_end = threading.Event()


def work(number: int) -> int:
    assert number == 1 or may_end.wait(PATIENCE)
    if number == 4:
        raise ValueError("a bug")
    return number


@pytest.mark.usefixtures("here")
def test_how_far_they_are_is_said_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.05)
    may_end.clear()
    seen: list[progress.Wait] = []

    def look_on() -> None:
        until = time.monotonic() + PATIENCE
        while not any("1 of 3" in line for line in caplog.messages) and time.monotonic() < until:
            seen[:] = [wait for wait in progress.under_way() if wait.what == "checkpoint.save"]
            time.sleep(0.01)
        seen[:] = [wait for wait in progress.under_way() if wait.what == "checkpoint.save"]
        missing.extend(seen[0].missing())
        may_end.set()

    missing: list[str] = []
    thread = threading.Thread(target=look_on)
    thread.start()
    found = call_all(
        WORKERS, lambda worker, number: rpc_async(worker, work, (number,)), "checkpoint.save: writing", SIZES
    )
    thread.join(PATIENCE)
    assert found == WORKERS
    assert missing == ["w2", "w3"]
    said = "checkpoint.save: writing: 1 of 3 workers are done, with 2.0 of 3.0 GB; waiting for 'w2', 'w3'"
    assert any(line.endswith(said) for line in caplog.messages)
    assert seen[0] not in progress.under_way()


@pytest.mark.usefixtures("here")
def test_what_fails_is_told_whether_it_was_followed_or_not() -> None:
    may_end.set()
    for doing in ("", "checkpoint.save: writing"):
        with pytest.raises(WorkersFailed) as caught:
            call_all({"w1": 4, "w2": 4, "w3": 3}, lambda worker, number: rpc_async(worker, work, (number,)), doing)
        assert set(caught.value.errors) == {"w1", "w2"}
        assert call_all(dict[str, int](), lambda worker, number: rpc_async(worker, work, (number,)), doing) == {}
