"""Callbacks of users are called whatever others of them do."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad._core.membership.membership import CallbackThread
from tests.cluster import PATIENCE


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_callbacks_go_on_after_one_that_fails(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    heard = queue.SimpleQueue[str]()

    def fail(_: Any) -> None:
        raise error

    teller, member = CallbackThread(lambda: None), SimpleNamespace(name="w1")
    teller.begin()
    teller.tell(fail, member)
    teller.tell(lambda each: heard.put(each.name), member)
    assert heard.get(timeout=PATIENCE) == "w1"
    teller.close()
    assert f"a callback of on_join, on_leave or on_lost failed for {member}" in caplog.text
