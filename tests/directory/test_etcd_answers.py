"""Tests with a fake gateway: servers other than etcd, and rare answers of a real etcd."""

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad._core.stores.directory import DirectoryLost, DirectoryRefused, Lease, LeaseLost, Swap
from telegrad.directories import on_redis
from telegrad.errors import StoreUntrusted
from tests.cluster import in_background, takes_less_than
from tests.directory.conftest import Connect
from tests.directory.harness import LONG, SOON

Answers = Callable[[str, dict[str, Any]], Any]


class Played:
    """A server whose answers come from a function, which may raise to close the connection without an answer."""

    def __init__(self, answers: Answers) -> None:
        asked = self.asked = list[tuple[str, dict[str, Any]]]()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, body))
                try:
                    answer = answers(self.path, body)
                except ConnectionError:
                    self.close_connection = True
                    return
                status, answer = answer if isinstance(answer, tuple) else (200, answer)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def played() -> Iterator[Callable[[Answers], Played]]:
    servers: list[Played] = []

    def play(answers: Answers) -> Played:
        servers.append(Played(answers))
        return servers[-1]

    yield play
    for each in servers:
        each.close()


Play = Callable[[Answers], Played]


def header(term: int = 2, revision: int = 5) -> dict[str, Any]:
    return {"header": {"cluster_id": "1", "revision": str(revision), "raft_term": str(term)}}


def test_a_write_without_an_answer_is_sent_once(played: Play, connected: Connect) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        raise ConnectionError

    one, other = played(answer), played(answer)
    client = connected(f"etcd://127.0.0.1:{one.port},127.0.0.1:{other.port}", 1.0)
    with pytest.raises(DirectoryLost, match="read the key again"):
        client.swap("a", b"")
    assert len(one.asked) + len(other.asked) == 1
    with pytest.raises(DirectoryLost, match="majority"):
        client.list("")
    assert len(one.asked) > 2
    assert len(other.asked) > 2


@pytest.mark.parametrize(
    ("code", "message", "is_sent_again"),
    [
        (14, "etcdserver: request timed out, possibly due to previous leader failure", False),
        (2, "raft proposal dropped", False),
        (14, "etcdserver: no leader", True),
        (8, "etcdserver: too many requests", True),
    ],
)
def test_a_write_is_sent_again_only_if_etcd_certainly_did_not_do_it(
    played: Play, connected: Connect, code: int, message: str, is_sent_again: bool
) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        if len(server.asked) == 1:
            return 503, {"error": message, "message": message, "code": code}
        return {**header(), "succeeded": True, "responses": [{"response_range": {}}]}

    server = played(answer)
    client = connected(f"etcd://127.0.0.1:{server.port}")
    if is_sent_again:
        assert client.swap("a", None) == Swap(True, None)
    else:
        with pytest.raises(DirectoryLost, match=message):
            client.swap("a", None)
    assert len(server.asked) == 1 + is_sent_again


@pytest.mark.parametrize("is_known", [True, False])
def test_a_renewal_by_a_former_leader_does_not_count(played: Play, connected: Connect, is_known: bool) -> None:
    """The read shows that another leader was elected."""
    terms = iter([2, 2, 2, 3, 3, 3])

    def answer(path: str, body: dict[str, Any]) -> Any:
        term = next(terms)
        if path != "/v3/lease/keepalive":
            return header(term)
        return {"result": {**header(term), "ID": body["ID"], **({"TTL": "9"} if term == 2 or is_known else {})}}

    server = played(answer)
    client = connected(f"etcd://127.0.0.1:{server.port}")
    lease = Lease(7, 9.0, 0.0)
    assert client.renew(lease).ttl == 9.0
    if is_known:
        assert client.renew(lease).ends > time.monotonic()
    else:
        with pytest.raises(LeaseLost):
            client.renew(lease)
    assert [path for path, _ in server.asked] == ["/v3/lease/keepalive", "/v3/kv/range"] * 3


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (404, b"404 page not found", DirectoryRefused, "enable-grpc-gateway"),
        (421, b"the Host header was unrecognized", DirectoryRefused, "Host header"),
        (403, b'{"code": 7, "message": "etcdserver: permission denied"}', DirectoryRefused, "password_file"),
        (400, b'{"code": 8, "message": "etcdserver: mvcc: database space exceeded"}', DirectoryRefused, "alarm disarm"),
        (502, b"<html>Bad gateway</html>", DirectoryLost, "502"),
        (200, b"[1]", DirectoryLost, "majority"),
    ],
)
def test_answers_of_other_servers_are_errors(
    played: Play, connected: Connect, status: int, body: bytes, error: type[Exception], text: str
) -> None:
    server = played(lambda *_: (status, body))
    with pytest.raises(error, match=text):
        connected(f"etcd://127.0.0.1:{server.port}", 1.5).list("")


@pytest.mark.parametrize(
    ("kind", "sends", "text"),
    [
        ("etcd", b"", "no answer in time"),
        ("etcd", b"SSH-2.0-\x1b[2J\r\n", r"SSH-2\.0-\\x1b\[2J"),
        ("etcd", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "no answer in time"),
        ("etcd", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{", "sent more than 67108864 bytes"),
        ("redis", b"$99\r\n", "Timeout reading"),
        ("redis", b"-ERR \x1b[2J\r\n", r"\\x1b\[2J"),
    ],
)
def test_a_server_that_never_completes_its_answer_is_lost(
    connected: Connect, kind: str, sends: bytes, text: str
) -> None:
    """The server sends some bytes now and then, without end."""
    closed = threading.Event()

    def serve() -> None:
        sock = listener.accept()[0]
        with sock, contextlib.suppress(OSError):
            sock.sendall(sends)
            while not closed.wait(0.05):
                sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, in_background(serve):
        with takes_less_than(0.5 + SOON):
            address = f"{kind}://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(DirectoryLost, match=text):
                connected(address, 0.5).swap("a", b"") if kind == "etcd" else on_redis.connect(address, 0.5)
        closed.set()


def test_a_watch_that_is_refused_is_an_error(played: Play, connected: Connect) -> None:
    refusal = {"error": {"grpc_code": 7, "http_code": 403, "message": "etcdserver: permission denied"}}
    server = played(lambda *_: json.dumps(refusal).encode() + b"\n")
    with pytest.raises(DirectoryRefused, match="permission denied"):
        connected(f"etcd://127.0.0.1:{server.port}").watch("", 0, LONG)


def test_a_watch_that_ends_again_and_again_is_lost(played: Play, connected: Connect) -> None:
    """The client tries again with growing pauses."""
    server = played(lambda *_: json.dumps({"result": {**header(), "created": True}}).encode() + b"\n")
    began = time.monotonic()
    with pytest.raises(DirectoryLost, match="closed"):
        connected(f"etcd://127.0.0.1:{server.port}", 1.0).watch("", 0, LONG)
    assert 0.5 < time.monotonic() - began < 1.0 + SOON
    assert 3 < len(server.asked) < 20


def test_a_version_that_ends_leases_causes_one_warning(
    played: Play, connected: Connect, recwarn: pytest.WarningsRecorder
) -> None:
    server = played(lambda *_: {**header(), "ID": "7", "TTL": "9", "version": "3.4.30"})
    for several in (False, True):
        client = connected("etcd://" + ",".join([f"127.0.0.1:{server.port}"] * (1 + several)))
        for _ in range(2):
            assert client.grant(9.0).id == 7
    assert [path for path, _ in server.asked].count("/v3/maintenance/status") == 1
    assert ["install 3.4.31" in str(each.message) for each in recwarn] == [True]


@pytest.mark.parametrize("entry", [{"key": "YQ=="}, "junk", {"key": "YQ==", "mod_revision": "x"}, None])
def test_an_invalid_answer_is_not_trusted(played: Play, connected: Connect, entry: Any) -> None:
    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/v3/watch":
            messages = {**header(), "created": True}, {**header(), "events": [{"kv": entry}]}
            return "\n".join(json.dumps({"result": each}) for each in messages).encode()
        ranged = {"kvs": [entry], "response_range": {"kvs": [entry]}}
        return {**header(), **ranged, "responses": [ranged], "TTL": [], "ID": entry}

    server = played(answer)
    client = connected(f"etcd://127.0.0.1:{server.port}/mine", 2.0)
    for ask in (
        lambda: client.list(""),
        lambda: client.swap("a", b""),
        lambda: client.grant(1.0),
        lambda: client.renew(Lease(7, 9.0, 0.0)),
        lambda: client.watch("", 5, SOON),
    ):
        with pytest.raises(StoreUntrusted, match=rf"127.0.0.1:{server.port} sent an invalid answer .* under 'mine/'"):
            ask()
