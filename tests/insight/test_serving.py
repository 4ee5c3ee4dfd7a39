"""The servers of the dashboard and of the metrics: clients that are idle or slow take a bounded number of threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from telegrad.insight import web
from telegrad.insight.prometheus import serve_metrics
from telegrad.insight.web import Dashboard
from tests.cluster import PATIENCE, wait_until
from tests.insight.accounts import made_up
from tests.insight.group import Group

SERVERS: dict[str, tuple[Callable[[], Any], str]] = {
    "dashboard": (lambda: Dashboard(Group(), lambda _: "", token="secret"), "/?token=secret"),
    "metrics": (lambda: serve_metrics(0, registry=CollectorRegistry(), account=made_up), "/metrics"),
}


@pytest.fixture(params=SERVERS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    make, path = SERVERS[request.param]
    before = threads_that_serve()
    server = make()
    yield server.port, path
    wait_until(lambda: threads_that_serve() == before)
    assert not server._server._ends
    server.close()


def threads_that_serve() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_a_crowd_of_silent_connections_is_bounded_and_others_are_served(served: tuple[int, str]) -> None:
    port, path = served
    with contextlib.ExitStack() as stack:
        for _ in range(2 * web.MOST_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
            assert answer.status == 200
        wait_until(lambda: threads_that_serve() <= web.MOST_CONNECTIONS)


def test_a_request_that_comes_by_drops_is_ended(served: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LONGEST_CONNECTION", 0.3)
    with socket.create_connection(("127.0.0.1", served[0]), 10) as sock:
        sock.settimeout(0.02)
        until = monotonic() + PATIENCE
        while not was_ended(sock):
            assert monotonic() < until


def was_ended(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"G")
        return not sock.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
