"""An HTTP server that idle and slow clients cannot exhaust, and the dashboard's: it serves the pages in `pages/`, and
their data.

Each request needs the token, first in the address, and then in a cookie of the browser. No request changes anything.
"""

import contextlib
import hashlib
import ipaddress
import json
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from errno import EINVAL
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from telegrad.ext.host import Thread, bracketed, family_of, forks, socket_address
from telegrad.insight.history import GroupHistory, GroupSnapshot, Source, notable, snapshot
from telegrad.insight.top import detail

MOST_CONNECTIONS = 64  # each has a thread; a browser opens at most six
LONGEST_CONNECTION = 60.0  # seconds to receive a request and send the response
PAUSE = 1.0  # minimum seconds between two queries of the group
SPANS = (2.0, 5.0, 15.0, 60.0)  # the spans in seconds that the page offers; each is computed once in PAUSE
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the first address contains the token
    "X-Content-Type-Options": "nosniff",
}


class BoundedServer(ThreadingHTTPServer):
    """Serves at most MOST_CONNECTIONS connections, each on its own thread for at most LONGEST_CONNECTION seconds."""

    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], name: str) -> None:
        """Serve on a thread of that name, until `stop`; raise OSError if this process cannot listen at that host and
        port, and OverflowError if there is no such port."""
        self.address_family = family_of(host)
        self._lock = threading.Lock()  # guards _ends
        self._ends: dict[socket.socket, float] = {}  # the deadline of each open connection, oldest first
        super().__init__(socket_address(host, port), handler)
        self._depth = forks.process.depth
        self._thread = Thread(target=self.serve_forever, args=(0.1,), name=name)
        try:
            self._thread.start()
        except BaseException:  # no memory for a thread
            self.server_close()
            raise

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def stop(self) -> None:
        """Stop listening, and wait for the thread to end. In a forked child, only close the child's socket."""
        # A forked child has no such thread, for which `shutdown` would wait forever.
        if self._depth == forks.process.depth:
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        # HTTPServer's method looks up the host's name, which may block for long.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; if there are too many, end the oldest, which is most likely idle."""
        with self._lock:
            oldest = next(iter(self._ends), None) if len(self._ends) >= MOST_CONNECTIONS else None
            if oldest is not None:
                self._end(oldest)
            self._ends[request] = time.monotonic() + LONGEST_CONNECTION
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections past their deadline. The server's loop calls this several times a second."""
        now = time.monotonic()
        with self._lock:
            for late in [sock for sock, until in self._ends.items() if until < now]:
                self._end(late)

    def _end(self, sock: socket.socket) -> None:
        """Make reads and writes of the connection's thread fail. The caller holds the lock."""
        # `shutdown` and not `close`: the thread still uses the descriptor, whose number another file could get.
        del self._ends[sock]
        with contextlib.suppress(OSError):  # the client has gone
            sock.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        # Removed before it is closed, so that `_end` shuts down only connections that are open.
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # else the client closed the connection
            super().handle_error(request, client_address)


class Dashboard(contextlib.AbstractContextManager["Dashboard"]):
    """A dashboard, served at `url` by its own threads until `close()`.

    The group is queried when a page asks, at most once a second for any number of pages. `why` explains why the group
    waits.

    Raises:
        OSError: this process cannot listen at that host and port.
    """

    def __init__(
        self,
        source: Source,
        why: Callable[[GroupSnapshot], str],
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        self.token: str = token or secrets.token_urlsafe(24)
        self._source, self._why = source, why
        # Guards the three below. It is held while the source is queried, which may take seconds; other viewers wait.
        self._lock = threading.Lock()
        self._history = GroupHistory()
        self._shown: dict[float, dict[str, Any]] = {}  # snapshots since the last query, by span
        self._next = 0.0  # when the group may be queried again
        digest = hashlib.sha256(f"cookie {self.token}".encode()).hexdigest()
        # Browsers share cookies between the ports of a host, so the name differs for each dashboard. The value is a
        # digest: the token itself does not stay in the browser's store.
        self.cookie: tuple[str, str] = (f"telegrad-{digest[:12]}", digest)
        self._host = host
        try:
            self._server = _Server(self, host, port)
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a part of the name has over 63 bytes
            number, said = (error.errno, error.strerror) if isinstance(error, OSError) else (EINVAL, error)
            told = f"the dashboard cannot listen at {host}:{port} ({said}); use another port, or 0 for a free one"
            raise OSError(number, told) from None

    @property
    def url(self) -> str:
        """Return the address with the token, which is a secret."""
        return f"http://{bracketed(self._host)}:{self.port}/?token={quote(self.token)}"

    @property
    def port(self) -> int:
        return self._server.port

    def data(self, seconds: float, worker: str = "", after: float = 0.0) -> dict[str, Any]:
        """Return the data of the last `seconds`, series only after a time of day, and the tables of one worker."""
        with self._lock:
            self._ask()
            if seconds not in self._shown:
                self._shown[seconds] = snapshot(self._history, seconds)
            found = self._shown[seconds] | {"series": self._history.series_after(after)}
            found["lanes"] = notable(found, worker)
            return found | ({"worker": detail(self._history, worker)} if worker else {})

    def why(self) -> str:
        with self._lock:
            self._ask()
            sight = self._history.sight
        # Without the lock: a snapshot is not changed later, and viewers need not wait for the report of a large group.
        try:
            return self._why(sight)
        except Exception as error:
            return f"The report failed: {type(error).__name__}: {error}"

    def _ask(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PAUSE
            self._shown.clear()
            self._history.update(self._source)

    def lets_in(self, token: str, cookies: str) -> bool:
        """Return True if the token or a cookie is right. Compare in constant time."""
        try:
            kept = SimpleCookie(cookies).get(self.cookie[0])
        except CookieError:
            kept = None
        given = kept.value if kept is not None else ""
        known = secrets.compare_digest(given.encode(), self.cookie[1].encode())
        return secrets.compare_digest(token.encode(), self.token.encode()) or known

    def is_called(self, host: str) -> bool:
        """Return True if a `Host` names this server, not another site whose name resolves to it (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            own = {"localhost", self._host.lower(), socket.gethostname().lower()}
            return name in own or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def close(self) -> None:
        self._server.stop()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(BoundedServer):
    def __init__(self, dashboard: Dashboard, host: str, port: int) -> None:
        self.dashboard = dashboard
        self.pages = {file.name: file.read_bytes() for file in (resources.files(__package__) / "pages").iterdir()}
        super().__init__(host, port, _PageHandler, "telegrad dashboard")


class _PageHandler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "telegrad", ""
    timeout = 10.0  # seconds to receive a request

    def do_GET(self) -> None:
        dashboard = self.server.dashboard
        path, _, rest = self.path.partition("?")
        asked = {name: values[0] for name, values in parse_qs(rest).items()}
        token, cookies = asked.get("token", ""), self.headers.get("Cookie", "")
        if not (dashboard.is_called(self.headers.get("Host", "")) and dashboard.lets_in(token, cookies)):
            self._answer(403, b"Open the address that the dashboard has printed: it has the token in it.")
        elif path == "/data":
            wanted = min(SPANS[-1], _number(asked.get("seconds"), SPANS[-1]))
            span, after = min(SPANS, key=lambda each: abs(each - wanted)), _number(asked.get("after"), 0.0)
            data = dashboard.data(span, asked.get("worker", ""), after)
            self._answer(200, json.dumps(data).encode(), "application/json")
        elif path == "/why":
            self._answer(200, dashboard.why().encode())
        else:
            self._page(path[1:] or "index.html")

    def refuse(self) -> None:
        self._answer(403, b"Here one can look, and no more.")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass  # the addresses contain the token

    def _page(self, name: str) -> None:
        body = self.server.pages.get(name)
        if body is None:
            self._answer(404, b"There is no such page.")
        else:
            cookie = "=".join(self.server.dashboard.cookie) + "; HttpOnly; SameSite=Strict; Path=/"
            self._answer(200, body, KINDS[name.rpartition(".")[2]], {"Set-Cookie": cookie})

    def _answer(self, status: int, body: bytes, kind: str = "text/plain", more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (HEADERS | (more or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _number(text: str | None, otherwise: float) -> float:
    """Return the number of a query, if it is one."""
    with contextlib.suppress(ValueError):
        return float(text or otherwise)
    return otherwise
