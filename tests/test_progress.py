"""Long waits are reported with their reason: on the terminal of a person, and otherwise in the log."""

import contextlib
import gc
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from unittest.mock import Mock

import pytest

from telegrad._core import texts
from telegrad._core.texts import Times, Wait, format_duration, report_in_background, under_way
from tests.cluster import PATIENCE, free_port

# Times of reports


def test_the_line_changes_each_second_and_log_messages_become_rarer() -> None:
    times = Times(100.0, lined=True)
    due = {now: times.due(100.0 + now) for now in range(60)}
    assert [now for now, (line, _) in due.items() if line] == list(range(1, 60))
    assert [now for now, (_, logs) in due.items() if logs] == [5, 50]


def test_seconds_without_a_look_are_skipped() -> None:
    times = Times(0.0, lined=True)
    assert times.left(0.25) == 0.75
    assert times.due(3.5) == (True, False)
    assert times.left(3.5) == 0.5
    assert times.due(3.75) == (False, False)
    assert times.left(7.0) == 0.0


def test_without_a_line_only_the_log_has_times() -> None:
    times = Times(0.0, lined=False)
    assert times.left(1.0) == texts.FIRST - 1.0
    assert times.due(texts.FIRST) == (False, True)
    assert times.left(texts.FIRST) == texts.FIRST * (texts.RARER - 1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.99, "1 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (5400, "1 h 30 min")]
)
def test_texts_of_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# Reports in the log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(texts, "monotonic", lambda: now[0])
    return now


def told(caplog: pytest.LogCaptureFixture, clock: list[float]) -> list[tuple[int, int]]:
    """Return the levels and the seconds of all messages in a wait of hours."""
    clock[0] = 0.0
    with caplog.at_level(logging.INFO, "telegrad"), Wait("shutdown", lambda: "for Godot") as wait:
        for clock[0] in range(10_000):
            wait.look()
    assert all(line.endswith("for Godot") for line in caplog.messages)
    return [(record.levelno, int(record.getMessage().split()[3])) for record in caplog.records]


def test_messages_are_logged_after_5_50_and_500_seconds(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    assert told(caplog, clock) == [(logging.WARNING, seconds) for seconds in (5, 50, 500, 5000)]


def test_a_variable_lowers_the_level_of_messages(
    caplog: pytest.LogCaptureFixture, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(texts.VARIABLE, "0")
    assert told(caplog, clock) == [(logging.INFO, seconds) for seconds in (5, 50, 500, 5000)]


def test_no_thread_is_started_without_a_line() -> None:
    before = threading.active_count()
    with report_in_background(Wait("shutdown", str)) as wait:
        assert threading.active_count() == before
        assert not wait.lined


def test_waiting_works_without_memory_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Wait("shutdown", str)
    waiting.lined = True
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with report_in_background(waiting) as wait:
        assert wait in under_way()
    assert wait not in under_way()


# Waits as other threads see them


def test_current_waits_are_listed_until_they_end() -> None:
    here = [Wait("init_rpc", lambda: "a", lambda: ["rank 2"], "host:1", "w0"), Wait("shutdown", lambda: "b")]
    with here[0], contextlib.suppress(ZeroDivisionError), here[1]:
        assert [wait for wait in under_way() if wait in here] == here
        assert (here[0].missing(), here[0].place, here[0].worker) == (["rank 2"], "host:1", "w0")
        assert here[0].thread == threading.get_ident()
        raise ZeroDivisionError
    assert not any(wait in here for wait in under_way())


def test_objects_of_a_wait_are_freed_at_once() -> None:
    class Waiting:
        def go(self) -> None:
            with Wait("init_rpc", lambda: f"{self}", lambda: [f"{self}"]) as self.wait:
                pass

    waiting = Waiting()
    seen = weakref.ref(waiting)
    waiting.go()
    gc.disable()
    try:
        del waiting
        assert seen() is None
    finally:
        gc.enable()


def test_a_forked_child_has_no_waits() -> None:
    gc.collect()  # a child would abort if it collected a server of torch's stores
    with Wait("shutdown", str) as wait:
        child = os.fork()
        if not child:
            left = len(under_way())
            wait.__exit__()
            os._exit(left)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Lines on a terminal


class Screen:
    """A terminal emulator that keeps its screen, and copies it at each bell."""

    CODES = re.compile(r"\x1b\[[0-9]*[A-Z]|\x1b.|[\r\n\a]|[^\x1b\r\n\a]+")

    def __init__(self, rows: int = 8) -> None:
        self.rows = [""] * rows
        self.row = self.column = 0
        self.saved = 0, 0
        self.pictures: list[list[str]] = []

    def feed(self, text: str) -> None:
        for code in self.CODES.findall(text):
            {
                "\r": self.carriage_return,
                "\n": self.down,
                "\a": self.picture,
                "\x1bD": self.down,
                "\x1bM": self.up,
                "\x1b7": self.save,
                "\x1b8": self.restore,
                "\x1b[B": self.down_if_any,
                "\x1b[K": self.erase,
            }.get(code, lambda code=code: self.put(code))()

    def put(self, text: str) -> None:
        assert not text.startswith("\x1b"), text
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    def carriage_return(self) -> None:
        self.column = 0

    def down(self) -> None:
        if self.row == len(self.rows) - 1:
            self.rows = [*self.rows[1:], ""]
        else:
            self.row += 1

    def down_if_any(self) -> None:
        self.row = min(self.row + 1, len(self.rows) - 1)

    def up(self) -> None:
        self.row -= 1

    def save(self) -> None:
        self.saved = self.row, self.column

    def restore(self) -> None:
        self.row, self.column = self.saved

    def erase(self) -> None:
        self.rows[self.row] = self.rows[self.row][: self.column]

    def picture(self) -> None:
        self.pictures.append(self.shown())

    def shown(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]


PRELUDE = """
import os, sys, logging
os.open(os.ttyname(0), os.O_RDWR)  # its terminal from now on
from telegrad._core import texts
from telegrad._core.texts import Wait, report_in_background
now = [0.0]
def look(wait, at):
    now[0] = at
    wait.look()
    print(end="\\a", flush=True)
"""
FAKE_CLOCK = "texts.monotonic = lambda: now[0]\n"


@contextlib.contextmanager
def in_terminal(
    program: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a program in a terminal of its own; yield the other end of the terminal and the process."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", **(environment or {})},
    )
    os.close(slave)
    try:
        yield master, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read(master: int, screen: Screen, enough: Callable[[], bool] = lambda: False) -> None:
    """Feed the screen until the output ends or `enough` is true."""
    with contextlib.suppress(OSError):  # a closed terminal raises an error
        while not enough() and (data := os.read(master, 1 << 16)):
            screen.feed(data.decode())


def shown(program: str, environment: Mapping[str, str] | None = None, rows: int = 8) -> Screen:
    """Return the screen after a program has ended; the program's clock is `now`."""
    screen = Screen(rows)
    with in_terminal(FAKE_CLOCK + program, environment) as (master, process):
        read(master, screen)
        assert process.wait(PATIENCE) == 0, screen.shown()
    return screen


WAITS = """
print("begun")
with Wait("shutdown", lambda: "for Godot") as wait:
    for at in (0.5, 1.0, 2.2, 65.0):
        look(wait, at)
print("ended")
"""


def test_a_line_is_updated_each_second_and_removed_at_the_end() -> None:
    screen = shown(WAITS)
    assert screen.pictures == [
        ["begun"],
        ["begun", "telegrad: waiting for 1 s: for Godot"],
        ["begun", "telegrad: waiting for 2 s: for Godot"],
        ["begun", "telegrad: waiting for 1 min 5 s: for Godot"],
    ]
    assert screen.shown() == ["begun", "ended"]


def test_a_line_scrolls_at_the_end_of_the_screen() -> None:
    screen = shown("print('1\\n2\\n3')\n" + WAITS, rows=3)
    assert screen.pictures[1:3] == [
        ["begun", "telegrad: waiting for 1 s: for Godot"],
        ["begun", "telegrad: waiting for 2 s: for Godot"],
    ]
    assert screen.shown() == ["begun", "ended"]


def test_a_line_is_removed_after_an_interrupt() -> None:
    screen = shown("""
try:
    with Wait("shutdown", lambda: "for Godot") as wait:
        look(wait, 1)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("caught")
""")
    assert screen.pictures == [["telegrad: waiting for 1 s: for Godot"]]
    assert screen.shown() == ["caught"]


def test_other_output_is_not_damaged_by_a_line() -> None:
    screen = shown("""
print("Shutting down ...", end="", flush=True)
with Wait("shutdown", lambda: "for Godot") as wait:
    look(wait, 1)
    print(" soon", flush=True)
    look(wait, 2)
    logging.getLogger("telegrad").warning("one\\ntwo\\nthree")
    look(wait, 2.5)
    look(wait, 3)
print("done")
""")
    line = "telegrad: waiting for {} s: for Godot"
    assert screen.pictures == [
        ["Shutting down ...", line.format(1)],
        ["Shutting down ... soon", line.format(2)],
        ["Shutting down ... soon", "one", "two", "three"],
        ["Shutting down ... soon", "one", "two", "three", line.format(3)],
    ]
    assert screen.shown() == ["Shutting down ... soon", "one", "two", "three", "done"]


def test_a_line_is_cut_to_the_width_of_the_terminal() -> None:
    (line,) = shown('with Wait("shutdown", lambda: 100 * "x") as wait: look(wait, 1)').pictures[0]
    assert len(line) == texts.COLUMNS - 1
    assert line.endswith("x...")


LOGS = """
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
{}
with Wait("shutdown", lambda: "for Godot") as wait:
    look(wait, 4)
    look(wait, 5)
"""
SAID = "telegrad: waiting for 5 s now: for Godot"


def test_a_shown_line_is_logged_at_level_info() -> None:
    assert shown(LOGS.format("")).shown() == [f"INFO {SAID}"]


@pytest.mark.parametrize(
    ("first", "environment", "last"),
    [
        ("", {"TERM": "dumb"}, [f"WARNING {SAID}"]),
        ("sys.stdin = open(os.devnull)", {}, [f"WARNING {SAID}"]),  # as in a process that a script has started
        ("sys.stdin = None", {}, [f"WARNING {SAID}"]),
        ("os.tcgetpgrp = lambda _: -1", {}, [f"WARNING {SAID}"]),  # a process in the background
        ("sys.modules['ipykernel'] = sys", {}, [f"WARNING {SAID}"]),
        ("", {"TELEGRAD_PROGRESS": "0"}, [f"INFO {SAID}"]),
        ("logging.getLogger('telegrad').setLevel(logging.ERROR)", {}, []),
    ],
    ids=["dumb", "no input", "no stdin", "background", "notebook", "variable", "log level"],
)
def test_there_is_no_line_without_a_person(first: str, environment: dict[str, str], last: list[str]) -> None:
    screen = shown(LOGS.format(first), environment)
    assert screen.pictures == [[], last]
    assert screen.shown() == last


def test_a_thread_updates_the_line_of_a_blocking_wait() -> None:
    screen = Screen()
    program = """
texts.LINE = 0.01
with report_in_background(Wait("telegrad.local", lambda: "for Godot")):
    sys.stdin.readline()
print("done")
"""
    with in_terminal(program) as (master, process):
        read(master, screen, lambda: bool(screen.shown()))
        assert re.fullmatch("telegrad: waiting for [0-9]+ s: for Godot", "".join(screen.shown()))
        os.write(master, b"\n")
        read(master, screen)
        assert process.wait(PATIENCE) == 0
    assert screen.shown() == ["done"]


@pytest.mark.nightly
@pytest.mark.timeout(4 * PATIENCE)
def test_a_person_sees_missing_workers_and_can_interrupt_the_wait() -> None:
    program = f"""
import telegrad.rpc as rpc
options = rpc.TelegradOptions(init_method="tcp://127.0.0.1:{free_port()}")
try:
    rpc.init_rpc("driver", rank=0, world_size=3, rpc_backend_options=options)
except KeyboardInterrupt:
    print("interrupted")
"""
    screen = Screen()
    with in_terminal(program) as (master, process):
        read(master, screen, lambda: any("did not join" in row for row in screen.shown()))
        (line,) = screen.shown()
        assert re.match("telegrad: waiting for [0-9]+ s: ranks 1, 2 did not join .'driver' joins a group", line)
        os.write(master, b"\x03")
        read(master, screen)
        assert process.wait(PATIENCE) == 0, screen.shown()
    assert screen.shown() == ["^C", "interrupted"] or screen.shown() == ["^Cinterrupted"]
