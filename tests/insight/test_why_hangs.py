"""Groups of processes that hang are explained within two seconds."""

import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from telegrad._core.sockets import HAS_UNIX
from telegrad.insight import collect, seen_groups
from telegrad.insight.history import GroupSnapshot
from telegrad.insight.phrases import NOTE, Finding
from telegrad.insight.report import Report
from telegrad.insight.seen_groups import HostGroup, groups_here
from telegrad.reporting import debug_server
from tests.cluster import PATIENCE, Process, free_port, processes, takes_less_than, wait_until
from tests.insight import more_hangs as more
from tests.insight.hangs import HANGS, Hang, Stage, led, slumber, work

LONG = 0.3  # seconds, shorter than the default so that the tests are short
WITHIN = 2.0  # seconds

pytestmark = pytest.mark.skipif(not HAS_UNIX, reason="workers can be queried from outside on Linux only")


@contextmanager
def hanging(hang: Hang, folder: pathlib.Path) -> Iterator[list[Process]]:
    """Start a group of processes, and wait until it hangs."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    stage = Stage(free_port(), str(pipe))
    try:
        with processes(hang.size) as group:
            try:
                for rank, process in enumerate(group):
                    process.begin(hang.run, rank, stage)
                for _ in range(hang.signals):
                    assert select.select([reading], [], [], PATIENCE)[0], "it does not come to where it hangs"
                    os.read(reading, 1)
                yield group
            finally:
                for process in group:
                    with suppress(ProcessLookupError):
                        process.kill(signal.SIGKILL)
    finally:
        os.close(reading)


def explained(group: list[Process], hang: Hang) -> tuple[Report, str, float]:
    until = time.monotonic() + LONG + 2 * WITHIN
    while True:
        begun = time.monotonic()
        report = Report(look_at(group), LONG)
        told = report.text()
        took = time.monotonic() - begun
        done = is_it(hang, report.findings, told) and report.status == expected_status(hang) and took < WITHIN
        if done or time.monotonic() > until:
            return report, told, took


def look_at(group: list[Process]) -> GroupSnapshot:
    pids = {process.pid for process in group}
    return HostGroup(place for place in debug_server.places() if place.pid in pids).look()


def expected_status(hang: Hang) -> int:
    return 0 if not hang.kind else 2 if hang.kind == "silent" else 1


def is_it(hang: Hang, found: list[Finding], told: str) -> bool:
    said = " ".join(told.split())
    first = (found[0].kind, *found[0].workers) if found else ("",)
    return first == (hang.kind, *hang.workers) and all(words in said for words in hang.words)


def called(function: Callable[[], object], *words: str, kind: str = "asleep") -> Hang:
    """Return the hang of a call, which stands at the line of the first of the words."""
    return Hang(2, partial(more.call, [function]), kind, ("worker1",), (f"more_hangs.{function.__name__}", *words))


def both(first: Callable[[], object], second: Callable[[], object], *words: str, kind: str = "lock") -> Hang:
    return Hang(2, partial(more.call, [first, second]), kind, ("worker1",), words, 2)


OWN, OTHER, OUTSIDE = "waits for something in its own process", "waits for another process", "sleeps, in a wait outside"
MORE = {
    "item of a data loader": called(more.sleep_in_item, "for _ in DataLoader(", OTHER),
    "asyncio queue": called(more.read_queue, "await messages.get()", OUTSIDE),
    "asyncio lock": both(
        more.keep_lock,
        more.want_lock,
        "waits for a lock (values[0]) that another coroutine holds, it seems",
        "worker1 runs tests.insight.more_hangs.keep_lock,",
        "await asyncio.Event().wait()",
        "async with values[0]:",
    ),
    "blocked loop": called(
        more.block_loop, "read_queue for worker1, has not begun, and", "block_loop for worker0 blocks", kind="deadlock"
    ),
    "semaphore": called(more.get_permit, "permits.acquire()", "its holder is not known", kind="lock"),
    "queue": called(more.read_empty_queue, "tasks.get()", OWN),
    "thread": called(more.join_thread, "thread.join()", OWN, "waits for its thread prefetch"),
    "program": called(more.run_program, 'subprocess.run(["cat"]', OTHER),
    "socket": called(more.receive, "values[0].recv(1)", OUTSIDE),
    "lock taken twice": called(
        more.take_twice,
        "the thread that holds it (lock) waits for it, too",
        "in take: with lock:",
        kind="lock deadlock",
    ),
    "pool in a pool": called(more.pool_in_pool, "pool.submit(lambda: pool.submit(leaf).result()).result()", OWN),
    "pool": called(more.map_in_pool, "waits for its thread ThreadPoolExecutor-0_0", "in slumber: held.wait()"),
    "to_thread": called(more.in_thread, "waits for its thread asyncio_0", "in slumber: held.wait()"),
    "call in a pool": led(
        more.call_in_pool,
        "asleep",
        "worker1",
        "worker0's main thread waits for its thread ThreadPoolExecutor-0_0",
        "in slumber: held.wait()",
    ),
    "import": both(
        more.import_slow,
        more.import_too,
        "waits for a lock (Python's, for an import) that another thread holds, it seems: worker1 runs",
        "more_hangs.import_slow, for",
        "slow_module.py:3 in <module>: held.wait()",
        "import slow_module",
    ),
    "logging": both(
        more.log_slowly,
        more.log_too,
        "waits for a lock (logging's) that another thread holds",
        "held.wait()",
        'log.warning("the loss is nan")',
    ),
    "file lock": led(
        more.lock_file, "asleep", "worker1", "lock_same_file, for", OUTSIDE, "fcntl.flock(file, fcntl.LOCK_EX)"
    ),
    "all_reduce of torch": Hang(
        3,
        more.reduce,
        "barrier",
        ("worker2",),
        ("worker2 has not arrived", "dist.all_reduce(", "in reduce: held.wait()"),
        3,
    ),
    "stream": led(
        more.stuck_stream, "asleep", "worker1", "more_hangs.stuck_items, for", OWN, "in slumber: held.wait()"
    ),
    "unread stream": led(
        more.unread_stream, "wait", "worker0", "waits for worker0, which reads its stream", "in slumber: held.wait()"
    ),
    "one of a group": led(
        more.group_call,
        "asleep",
        "worker2",
        "worker2 runs",
        "more_hangs.sleep_on, for",
        "in slumber: held.wait()",
        size=4,
    ),
    "local future": led(more.local_future, "", "", "except perhaps main threads that sleep", "in local_future"),
    "callback": led(
        more.blocking_callback,
        "asleep",
        "worker0",
        "A thread waits for this one, it seems: worker0's thread",
        "in slumber: held.wait()",
    ),
    "actor": led(
        more.actor_circle,
        "deadlock",
        "worker0 worker1",
        "Deadlock, it seems",
        "in pay: return rpc.rpc_sync(other",
        "balance() of",
        "ask_again",
    ),
    "module with a lock": led(
        more.guarded_module,
        "lock",
        "worker1",
        "waits for a lock (lock) that another thread holds",
        "in take: with lock:",
        "in keep",
        by=more.keep,
    ),
    "stage": led(
        more.stuck_stage, "asleep", "worker2", "is in slumber", "stage 2 of 2", "in slumber: held.wait()", size=3
    ),
    "no publisher": Hang(
        2,
        more.no_publisher,
        "wait",
        ("worker0",),
        ("there is no publisher 'policy' here", 'Subscriber("worker0", "policy"'),
    ),
    "subscriber": led(
        more.slow_subscriber,
        "wait",
        "worker1",
        "version 1 of 'policy' was not received yet by worker1",
        "publisher.publish(wait=0)",
    ),
    "version": led(
        more.no_version,
        "wait",
        "worker0",
        "version 3 of 'policy' on worker 'worker0'; the newest is 0",
        "subscriber.at_least(3",
    ),
    "unpublished": led(more.unpublished, "wait", "worker0", "waits in finding a value", "no worker publishes it"),
    "stopped leader of an elastic group": Hang(
        3,
        partial(more.within_step, 0, more.stop),
        "silent",
        ("w0",),
        ("w0 does not answer", "main thread is in rendezvous_again, and waits for w0"),
    ),
    "long step of an elastic group": Hang(
        3,
        partial(more.within_step, 1, slumber),
        "shutdown",
        ("w1",),
        ("w1 has not called rendezvous_again", "w0's main thread is in", "w2's main thread is in"),
    ),
    "call during shutdown": Hang(
        2, more.leaving_early, "asleep", ("worker1",), ("slumber, for", "in slumber: held.wait()", "rpc.shutdown()")
    ),
}


# `tests/witness` asks stopped workers and ones whose interpreter is held; other cases have the same waits as these.
REPEATED = {*MORE, "stopped", "held interpreter", "no gather", "wait for all"} - {"blocked loop", "pool", "to_thread"}
REPEATED -= {"call in a pool", "stopped leader of an elastic group", "long step of an elastic group"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in REPEATED else ()) for name in HANGS | MORE]
)
def test_a_hang_is_explained(name: str, tmp_path: pathlib.Path) -> None:
    hang = (HANGS | MORE)[name]
    with hanging(hang, tmp_path) as group:
        report, told, took = explained(group, hang)
    print(f"{told}\nin {took:.2f} s")
    assert is_it(hang, report.findings, told)
    assert report.status == expected_status(hang)
    assert took < WITHIN


def test_a_working_group_has_no_findings(tmp_path: pathlib.Path) -> None:
    at_work = Hang(3, work, "", (), (), 3)
    titles: list[str] = []
    with hanging(at_work, tmp_path) as group:
        for _ in range(20):
            sight = look_at(group)
            titles += {each.title for each in Report(sight).findings if each.weight > NOTE}
            assert len(sight.accounts) == 3
    assert len(titles) < 2, titles  # on a busy machine, one step may be a long wait


def test_spares_of_an_elastic_group_are_a_note_in_its_group(tmp_path: pathlib.Path) -> None:
    with hanging(Hang(4, more.spare, "wait", (), (), 2), tmp_path) as group:
        pids = {process.pid for process in group}

        def found() -> list[HostGroup]:
            return [each for each in groups_here().values() if pids & {place.pid for place in each._places}]

        def noted(group: HostGroup) -> list[int]:
            return [len(finding.workers) for finding in Report(group.look(), LONG).findings]

        wait_until(lambda: list(map(noted, found())) == [[2]])
        (whole,) = found()
        sight = whole.look()
        told = collect.trace_from_outside(tmp_path / "trace.json", whole)
    report = Report(sight, LONG)
    (note,) = report.findings
    assert (note.kind, note.weight, report.status) == ("wait", NOTE, 0)
    first, second = note.workers
    title = f"{first} and {second} wait for the next generation: generation 1 is running until 'w0', 'w1' call rendezv"
    assert title in note.title
    assert [account["worker"] for account in sight.accounts] == ["w0", "w1", first, second]
    assert [account["phase"] for account in sight.accounts] == ["member", "member", "spare", "spare"]
    assert "2 workers, " in told
    assert f"{second}: no events; it is a spare" in told


# Other processes, which may imitate workers


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_process_with_an_imitated_stacks_file_gets_no_signal(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "memfd:stacks-of-telegrad"
    if kind == "file":
        path.touch()
    else:
        os.mkfifo(path)
    opened = os.open(path, os.O_RDWR)
    try:
        program = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
        with subprocess.Popen(program, pass_fds=[opened], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert seen_groups.stacks_of(process.pid, opened) == ""
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait() == 0
    finally:
        os.close(opened)


def test_long_lines_of_stacks_are_parsed_quickly() -> None:
    with takes_less_than(10):
        assert seen_groups._where('File "' * (seen_groups.MOST_OF_STACKS // 6)) == ""
