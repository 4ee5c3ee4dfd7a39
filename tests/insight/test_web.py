"""The dashboard's server: access, pages, the rate of queries, and the number of connections."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPMessage
from importlib import resources
from time import monotonic
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from telegrad.insight import web
from telegrad.insight.history import GroupSnapshot
from telegrad.insight.prometheus import serve_metrics
from telegrad.insight.web import SPANS, Dashboard
from tests.cluster import PATIENCE, wait_until
from tests.insight.accounts import made_up
from tests.insight.group import WORKERS, Group

TOKEN = "secret"


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    dashboard = Dashboard(Group(), why, token=TOKEN)
    yield dashboard
    dashboard.close()


def why(sight: GroupSnapshot) -> str:
    return f"{len(sight.accounts)} workers, and none waits."


def ask(dashboard: Dashboard, path: str, method: str = "GET", **headers: str) -> tuple[int, str, HTTPMessage]:
    connection = HTTPConnection("127.0.0.1", dashboard.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


def cookie(dashboard: Dashboard) -> str:
    _, _, headers = ask(dashboard, f"/?token={TOKEN}")
    return headers["Set-Cookie"].partition(";")[0]


def test_the_token_gives_access_and_sets_a_cookie(dashboard: Dashboard) -> None:
    status, page, headers = ask(dashboard, f"/?token={TOKEN}")
    assert status == 200
    assert page.startswith("<!doctype html>")
    assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
    assert TOKEN not in headers["Set-Cookie"]
    assert ask(dashboard, "/style.css", Cookie=cookie(dashboard))[0] == 200


REFUSED: list[tuple[str, dict[str, str]]] = [
    *(
        (path, {})
        for path in ("/", "/data", "/why", "/main.js", "/nothing", "/?token=", "/?token=secreT", "/?token=%ff%00")
    ),
    *(("/", {"Cookie": value}) for value in ("telegrad=secret", "=;;\x80")),
    *((f"/?token={TOKEN}", {"Host": name}) for name in ("evil.example", "127.0.0.1.evil.example:80", "[::1", "")),
]


@pytest.mark.parametrize(("path", "headers"), REFUSED)
def test_unauthorized_requests_are_refused(dashboard: Dashboard, path: str, headers: dict[str, str]) -> None:
    status, body, answered = ask(dashboard, path, **headers)
    assert status == 403
    assert "token" in body
    assert answered["Set-Cookie"] is None


@pytest.mark.parametrize("value", ["telegrad-x=", "{name}=", "{name}=wrong", "{name}=\x80"])
def test_wrong_cookies_are_refused(dashboard: Dashboard, value: str) -> None:
    assert ask(dashboard, "/", Cookie=value.format(name=dashboard.cookie[0]))[0] == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:80", "10.1.2.3:80"])
def test_requests_by_address_or_through_a_tunnel_are_accepted(dashboard: Dashboard, host: str) -> None:
    assert ask(dashboard, f"/?token={TOKEN}", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
def test_methods_other_than_get_are_refused(dashboard: Dashboard, method: str) -> None:
    assert ask(dashboard, f"/?token={TOKEN}", method)[0] == 403


def test_answers_are_not_cached_and_load_nothing_from_elsewhere(dashboard: Dashboard) -> None:
    for path in ("/", "/data", "/why", "/nothing"):
        _, _, headers = ask(dashboard, path, Cookie=cookie(dashboard))
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert (headers["Referrer-Policy"], headers["Server"].strip()) == ("no-referrer", "telegrad")


@pytest.mark.parametrize("path", ["/nothing", "/../dashboard.py", "/%2e%2e/dashboard.py", "//etc/passwd", "/pages/"])
def test_only_pages_are_served(dashboard: Dashboard, path: str) -> None:
    assert ask(dashboard, path, Cookie=cookie(dashboard))[0] == 404


def test_data(dashboard: Dashboard) -> None:
    status, body, headers = ask(dashboard, "/data?seconds=5", Cookie=cookie(dashboard))
    data = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert [worker["worker"] for worker in data["workers"]] == WORKERS
    assert (data["seconds"], data["trouble"]) == (5, "")
    assert data["gantt"]["bars"]
    assert "worker" not in data
    after = data["epoch"] + data["now"]
    assert len(json.loads(ask(dashboard, f"/data?after={after}", Cookie=cookie(dashboard))[1])["series"]) in (0, 4)
    one = json.loads(ask(dashboard, "/data?worker=stage1", Cookie=cookie(dashboard))[1])["worker"]
    assert "stage1 rank 1 on node, pid 101" in one["about"]
    name, columns, rows = one["tables"][1]
    assert (name, columns[:2], len(rows)) == ("Calls in", [["age", True], ["from", False]], 1)
    assert rows[0][:4] == ["900ms", "trainer", "running", "torch.add"]
    other = json.loads(ask(dashboard, "/data?worker=x", Cookie=cookie(dashboard))[1])["worker"]
    assert (other["about"][:26], other["tables"]) == ("no worker 'x' was found he", [])


@pytest.mark.parametrize(
    ("asked", "served"),
    [("", 60), ("x", 60), ("nan", 60), ("1e9", 60), ("inf", 60), ("0", 2), ("-inf", 2), ("4.001", 5)],
)
def test_requested_seconds_are_rounded_to_a_supported_span(dashboard: Dashboard, asked: str, served: float) -> None:
    assert json.loads(ask(dashboard, f"/data?seconds={asked}", Cookie=cookie(dashboard))[1])["seconds"] == served


def test_the_page_offers_the_supported_spans(dashboard: Dashboard) -> None:
    """Other spans would be computed for each viewer while the others wait."""
    page = ask(dashboard, "/index.html", Cookie=cookie(dashboard))[1]
    options = re.search(r'<select id="seconds">(.*?)</select>', page, re.DOTALL)
    assert options is not None
    assert tuple(map(float, re.findall(r'value="(\d+)"', options[1]))) == SPANS
    for number in range(100):
        ask(dashboard, f"/data?seconds={number / 2 + 0.001}", Cookie=cookie(dashboard))
    assert set(dashboard._shown) <= set(SPANS)


def test_the_why_page_shows_the_report_or_its_failure(dashboard: Dashboard) -> None:
    assert ask(dashboard, "/why", Cookie=cookie(dashboard))[1] == "4 workers, and none waits."
    with Dashboard(Group(), lambda sight: str(1 // 0), token=TOKEN) as other:
        assert ask(other, "/why", Cookie=cookie(other))[1] == (
            "The report failed: ZeroDivisionError: integer division or modulo by zero"
        )


def test_each_dashboard_has_a_token_and_a_cookie_of_its_own() -> None:
    with Dashboard(Group(), why) as one, Dashboard(Group(), why, token="a&b c;d") as other:
        assert one.url.startswith("http://127.0.0.1:")
        assert len(one.token) >= 32
        assert one.cookie[0] != other.cookie[0]
        assert ask(other, other.url.removeprefix(f"http://127.0.0.1:{other.port}"))[0] == 200


def test_the_group_is_queried_on_request_and_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(web, "time", SimpleNamespace(monotonic=lambda: now[0]))
    group = Group()
    with Dashboard(group, why) as dashboard:
        assert group.looks == 0
        for now[0], looks in [(0.0, 1), (0.9, 1), (1.0, 2), (1.5, 2), (99.0, 3)]:
            dashboard.data(5)
            dashboard.why()
            assert group.looks == looks


def test_pages_refer_only_to_each_other() -> None:
    pages: dict[str, Any] = {
        file.name: file.read_text() for file in resources.files("telegrad.insight").joinpath("pages").iterdir()
    }
    named = {name for page in pages.values() for name in re.findall(r'(?:from|src=|href=) ?"(?:\./)?([^"#]+)"', page)}
    assert named == pages.keys() - {"index.html"}
    assert not [page for page in pages.values() if re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)]


# Idle and slow clients take a bounded number of threads, of the dashboard and of the metrics


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


def test_silent_connections_are_bounded_and_others_are_served(served: tuple[int, str]) -> None:
    port, path = served
    with contextlib.ExitStack() as stack:
        for _ in range(2 * web.MOST_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
            assert answer.status == 200
        wait_until(lambda: threads_that_serve() <= web.MOST_CONNECTIONS)


def test_a_request_that_arrives_slowly_is_ended(served: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
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
