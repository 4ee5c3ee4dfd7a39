"""Workers report their state to each other, to programs of their host, and in files."""

import errno
import gc
import io
import json
import logging
import os
import pathlib
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from time import process_time
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from telegrad import autograd, rpc
from telegrad._core.private_files import Folder
from telegrad._core.sockets import HAS_UNIX
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, UsageError
from telegrad.insight import seen_groups
from telegrad.insight.seen_groups import DumpFiles, HostGroup, OwnGroup, groups_here, inspect, stacks_of
from telegrad.reporting import (
    DUMP,
    MEMBER,
    MOST_ALIKE,
    QUEUED,
    RUNNING,
    UNFINISHED,
    WorkerState,
    counts,
    debug_server,
    introspection,
    process_state,
)
from telegrad.reporting.debug_server import DebugAddress
from telegrad.reporting.introspection import Introspection, introspection_of
from tests.cluster import (
    PATIENCE,
    Process,
    agents,
    agents_here,
    free_port,
    group,
    in_background,
    in_threads,
    init,
    processes,
    wait_until,
)

gate = threading.Event()
inside = threading.Semaphore(0)


def wait_here() -> None:
    inside.release()
    gate.wait(PATIENCE)  # the line that reports show


def ask_back(times: int) -> None:
    here = current.here().agent.name
    if times:
        rpc.rpc_sync({"w0": "w1", "w1": "w0"}[here], ask_back, (times - 1,))
    else:
        wait_here()


@rpc.functions.async_execution
def promise() -> torch.futures.Future[None]:
    inside.release()
    found: torch.futures.Future[None] = torch.futures.Future()

    def keep() -> None:
        gate.wait(PATIENCE)
        found.set_result(None)

    threading.Thread(target=keep, name="telegrad-worker", daemon=True).start()
    return found


@pytest.fixture
def held(pair: list[Worker]) -> Iterator[Callable[..., list[WorkerState]]]:
    """Begin calls from `w0` to `w1`; return the states of both workers once all calls run."""
    gate.clear()
    futures: list[Any] = []

    def hold(function: Callable[..., Any], *args: Any, times: int = 1) -> list[WorkerState]:
        futures.extend(pair[0].agent.call_async("w1", function, args, None) for _ in range(times))
        for _ in range(times):
            assert inside.acquire(timeout=PATIENCE)
        accounts, silent = introspection_of(pair[0]).look()
        assert silent == {}
        return accounts

    yield hold
    gate.set()
    for future in futures:
        future.wait()


def test_both_ends_report_a_call_with_its_current_line(held: Callable[..., list[WorkerState]]) -> None:
    caller, callee = held(wait_here)
    assert (caller["worker"], caller["phase"], caller["size"]) == ("w0", MEMBER, 2)
    assert caller["group"] == callee["group"] != ""
    assert set(caller["members"]) == {"w0", "w1"}
    (out,), (came,) = caller["calls_out"], callee["calls_in"]
    assert (out["to"], out["function"], out["thread"]) == ("w1", f"{__name__}.wait_here", None)
    assert (came["caller"], came["number"], came["state"]) == ("w0", out["number"], RUNNING)
    assert came["function"] == out["function"]
    thread = next(each for each in callee["threads"] if each["number"] == came["thread"])
    assert thread["at"] is not None
    assert thread["at"]["function"] == "wait_here"
    assert thread["at"]["text"] == "gate.wait(PATIENCE)  # the line that reports show"
    assert thread["at"]["file"].endswith("test_witness.py")
    assert json.loads(json.dumps(caller)) == caller


def test_the_threads_that_wait_for_calls_are_found_by_their_stacks(
    held: Callable[..., list[WorkerState]], pair: list[Worker]
) -> None:
    told = held(ask_back, 2)
    while sum(call["thread"] is not None for account in told for call in account["calls_out"]) < 2:
        told, _ = introspection_of(pair[0]).look()  # a thread may have sent its call without waiting yet
    accounts = {account["worker"]: account for account in told}
    (inner,) = accounts["w1"]["calls_out"]
    (waits,) = [call for call in accounts["w1"]["calls_in"] if call["thread"] == inner["thread"]]
    assert waits["caller"] == "w0"
    back = [call for call in accounts["w0"]["calls_in"] if call["number"] == inner["number"]]
    assert [call["caller"] for call in back] == ["w1"]
    assert back[0]["thread"] in [call["thread"] for call in accounts["w0"]["calls_out"]]


def test_a_call_whose_function_returned_a_future_is_unfinished(
    held: Callable[..., list[WorkerState]], pair: list[Worker]
) -> None:
    _, callee = held(promise)
    while [call["state"] for call in callee["calls_in"]] != [UNFINISHED]:
        assert [call["state"] for call in callee["calls_in"]] == [RUNNING]  # the function has not returned yet
        _, callee = introspection_of(pair[0]).look()[0]


def test_calls_without_a_slot_are_queued_and_only_some_of_many_equal_ones_are_listed() -> None:
    gate.clear()
    with agents(2, num_worker_threads=1) as (first, second):
        futures = [first.agent.call_async("w1", wait_here, None, None) for _ in range(MOST_ALIKE + 50)]
        assert inside.acquire(timeout=PATIENCE)
        here: list[WorkerState] = []

        def all_have_come() -> bool:
            here[:] = [introspection_of(second).account()]
            return counts(here[0]["calls_in"], lambda call: call["state"]) == {QUEUED: MOST_ALIKE + 49, RUNNING: 1}

        wait_until(all_have_come)
        assert len(here[0]["calls_in"]) == MOST_ALIKE + 1
        assert (here[0]["slots"], here[0]["busy"]) == (1, 1)
        out = introspection_of(first).account()["calls_out"]
        assert len(out) == MOST_ALIKE
        assert out[-1]["more"] == 50
        assert counts(out, lambda call: call["to"]) == {"w1": MOST_ALIKE + 50}
        gate.set()
        for future in futures:
            future.wait()
        for _ in futures[1:]:
            assert inside.acquire(timeout=PATIENCE)


def test_a_timeout_error_has_the_current_line_of_the_callee(pair: list[Worker]) -> None:
    gate.clear()
    for call in (
        lambda: pair[0].agent.call("w1", wait_here, None, None, 0.1),
        lambda: pair[0].agent.call_async("w1", wait_here, None, None, 0.3).wait(),
    ):
        said = r"still be running there: for \d\.\d s so far, at .*test_witness.py:\d+ in wait_here: `gate\.wait"
        with pytest.raises(CallTimeout, match=said):
            call()
        assert inside.acquire(timeout=PATIENCE)
    gate.set()
    there: dict[str, Any] = {}
    exec(compile("def typed(): __import__('threading').Event().wait(1)", "<cell 1>", "exec"), there)  # in no file
    with pytest.raises(CallTimeout, match=r"so far, at <cell 1>:1 in typed\. Give"):
        pair[0].agent.call("w1", there["typed"], None, None, 0.1)


def ask_for_a_promise() -> str:
    introspection.AT_ONCE = PATIENCE  # the other worker may be slow on a busy machine
    with agents(2) as (caller, _):
        try:
            caller.agent.call("w1", promise, None, None, 1.0)
        except CallTimeout as error:
            return str(error)
        finally:
            gate.set()
    return ""


def test_a_timeout_error_of_an_unfinished_call_has_the_line_of_its_thread() -> None:
    """The call runs in a process of its own, as a thread of an earlier test could be mistaken for the thread."""
    with processes(1) as (alone,):
        told = alone.run(ask_for_a_promise)
    said = r"still be running there: for \d\.\d s so far, at .*test_witness.py:\d+ in keep: `gate\.wait"
    assert re.search(said, told), told


def test_a_backward_pass_reports_the_workers_that_it_waits_for(pair: list[Worker]) -> None:
    gate.clear()
    leaf = torch.ones(2, requires_grad=True)

    def train() -> None:
        current.enter(pair[0])
        with autograd.context() as context:
            value = rpc.rpc_sync("w1", hooked, (leaf,))
            autograd.backward(context, [value.sum()])

    with in_background(train):
        assert inside.acquire(timeout=PATIENCE)
        while (owing := [each["owing"] for each in introspection_of(pair[0]).account()["passes"]]) == [["w0"]]:
            pass  # its own part is not reported as done yet
        assert owing == [["w1"]]
        threads = introspection_of(pair[0]).account()["threads"]
        waits = [(wait["what"], wait["on"]) for thread in threads if (wait := thread["wait"]) is not None]
        assert waits == [("asks", []), ("backward", ["w1"])]  # this thread, too
        gate.set()


def hooked(value: torch.Tensor) -> torch.Tensor:
    made = value * 2
    made.register_hook(lambda _: wait_here())
    return made


# From outside


def hold_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes longer than any test


def listen() -> None:
    """Do nothing."""


@pytest.mark.skipif(not HAS_UNIX, reason="there are no desks here")
def test_a_group_is_found_from_outside_with_its_silent_workers() -> None:
    with group(3) as members:
        pids = {member.name: member.pid for member in members}
        mine = next(iter(each for each in groups_here().values() if _has(each, pids)))
        accounts, silent = mine.look()
        assert [account["pid"] for account in accounts] == list(pids.values())
        assert silent == {}
        os.kill(pids["worker1"], signal.SIGSTOP)
        members[2].begin(hold_interpreter)
        accounts, silent = mine.look()
        while "worker2" not in silent:  # the worker answered before it hung
            accounts, silent = mine.look()
        assert [account["worker"] for account in accounts] == ["worker0"]
        assert "is stopped" in silent["worker1"]
        assert "holds the interpreter, at " in silent["worker2"]
        assert "in hold_interpreter" in silent["worker2"]
        pids.pop("worker0")
        wait_until(lambda: any(name and _has(each, pids) for name, each in groups_here().items()))
        seen = members[0].run(lambda: OwnGroup(introspection_of(current.joined())).look().silent)
        assert "is stopped" in seen["worker1"]
        members[1].kill()
        members[2].kill()


def _has(found: HostGroup, pids: dict[str, int]) -> bool:
    return {place.pid for place in found._places} >= set(pids.values())


def test_an_ended_process_is_reported_as_ended(workers: list[Process]) -> None:
    assert inspect(1 << 22, -1) == "its process has ended"


@pytest.mark.parametrize(
    ("work", "runs", "does"),
    [(9.0, True, "is busy, and"), (0.0, False, "sleeps"), (0.0, True, "has a thread"), (None, False, "has a thread")],
)
def test_a_process_sleeps_only_if_no_thread_waits_for_a_processor(
    monkeypatch: pytest.MonkeyPatch, work: float | None, runs: bool, does: str
) -> None:
    seen = iter([{"1": (0.0, runs)}, {} if work is None else {"1": (work, runs)}])
    monkeypatch.setattr(seen_groups, "_work_of", lambda _: next(seen))
    assert f"its process ({os.getpid()}) {does}" in inspect(os.getpid(), -1)


@pytest.mark.skipif(not HAS_UNIX, reason="there are no desks here")
def test_a_worker_that_is_renamed_while_joining_is_always_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []
    close = debug_server.DebugServer.close

    def look_and_close(one: debug_server.DebugServer) -> None:
        found.append({place.worker for place in debug_server.places() if place.pid == os.getpid()})
        close(one)
        found.append({place.worker for place in debug_server.places() if place.pid == os.getpid()})

    monkeypatch.setattr(debug_server.DebugServer, "close", look_and_close)
    witness = Introspection("someone")
    member = SimpleNamespace(name="someone-7", id=7)
    worker: Any = SimpleNamespace(me=member, membership=SimpleNamespace(present=list))
    witness.on_join(worker)
    assert ["someone" in names for names in found] == [True, False]
    assert all("someone-7" in names for names in found)
    witness.close()


def test_unknown_addresses_and_topics_have_no_answer(pair: list[Worker]) -> None:
    place = next(each for each in debug_server.places() if each.pid == os.getpid() and each.worker == "w1")
    nobody = DebugAddress(place.address + "x", 0, -1, "", os.geteuid())
    told = debug_server.ask_all([place, nobody], "account")
    assert told[place]["worker"] == "w1"
    assert isinstance(told[nobody], ConnectionRefusedError)
    assert debug_server.ask_all([place], "nothing of the kind") == {place: None}


# To files


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no such signal")
def test_a_signal_writes_a_dump(tmp_path: pathlib.Path) -> None:
    with group(2) as members:
        members[1].run(_write_to, str(tmp_path))
        members[1].kill(signal.SIGUSR2)
        wait_until(lambda: any(tmp_path.iterdir()))
        (path,) = tmp_path.iterdir()
        wait_until(lambda: path.stat().st_size > 0 and path.read_text().endswith("}"))
        assert json.loads(path.read_text())["reason"] == "received SIGUSR2"
        (account,) = DumpFiles([path]).look().accounts
        assert account["worker"] == "worker1"
        assert members[1].run(os.getpid) == members[1].pid  # the worker goes on


def test_a_signal_with_a_handler_of_the_program_is_left_alone() -> None:
    with processes(1) as (program,):
        program.run(_use_signal)
        program.run(init, 0, 1, free_port())
        program.kill(signal.SIGUSR2)
        program.run(_heard)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the signal is not used here")
@pytest.mark.parametrize("on_a_thread", [False, True])
def test_a_handler_that_the_program_sets_later_is_left_alone(on_a_thread: bool) -> None:
    with processes(1) as (program,):
        program.run(_join_on_a_thread if on_a_thread else _join, free_port())
        before = program.run(_stacks_file)
        program.run(_write_stacks_to_self)
        program.run(_use_signal)
        assert stacks_of(program.pid, before) == ""
        assert not program.run(_has_heard)
        program.run(rpc.shutdown)
        program.kill(signal.SIGUSR2)
        program.run(_heard)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the signal is not used here")
def test_a_signal_to_a_program_that_has_left_does_not_end_it() -> None:
    with processes(1) as (program,):
        program.run(_join, free_port())
        program.run(rpc.shutdown)
        program.kill(signal.SIGUSR2)
        program.run(_join, free_port())  # the next worker handles it again
        program.run(_write_stacks_to_self)


def _join(port: int) -> None:
    init(0, 1, port)


def _stacks_file() -> int:
    return introspection_of(current.here())._signalled.file


def _write_stacks_to_self() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_until(lambda: "Current thread" in pathlib.Path(f"/proc/self/fd/{_stacks_file()}").read_text())


def _join_on_a_thread(port: int) -> None:
    in_threads(lambda: init(0, 1, port))


def _write_to(folder: str) -> None:
    os.environ[introspection.VARIABLE] = folder


def _use_signal() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: heard.append(True))


def _has_heard() -> bool:
    return bool(heard)


def _heard() -> None:
    wait_until(lambda: heard == [True])


heard: list[bool] = []


def test_dumps_contain_the_state_and_events_of_workers(
    pair: list[Worker], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert introspection_of(pair[0]).dump() is None  # tests disable dumps
    monkeypatch.setenv(introspection.VARIABLE, str(tmp_path / "dumps"))
    monkeypatch.setattr(introspection, "KEPT", 2)
    pair[0].agent.call("w1", len, ((),), None)
    paths = in_threads(*[introspection_of(worker).dump for worker in pair])
    written = DumpFiles(paths)
    assert [account["worker"] for account in written.look().accounts] == ["w0", "w1"]
    assert written.events({})["w0"][-1] == tuple(json.loads(paths[0].read_text())["events"][-1])
    assert (tmp_path / "dumps").stat().st_mode & 0o777 == 0o700
    (tmp_path / "dumps" / "config.json").write_text("of the program")
    for _ in range(3):
        last = introspection.write_dump("another", "because", {})
    assert len(list((tmp_path / "dumps").iterdir())) == 3
    assert (tmp_path / "dumps" / "config.json").exists()
    monkeypatch.setattr(introspection, "ALL", 1)
    newest = introspection.write_dump("another", "because", {})
    assert sorted(path.name for path in (tmp_path / "dumps").glob("*-another-*")) == [newest.name]
    assert newest.name != last.name


def test_a_dump_that_cannot_be_written_is_logged_once(
    pair: list[Worker], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(introspection.VARIABLE, str(tmp_path / "file" / "dumps"))
    for _ in range(2):
        assert introspection_of(pair[0]).dump() is None
    (record,) = caplog.records
    assert "the state of worker 'w0', for `telegrad why`, could not be written: [Errno 20]" in record.getMessage()
    assert "could not be written" in introspection_of(pair[0])._answer(DUMP, None)


def test_a_dump_without_descriptors_logs_advice(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(introspection, "write_dump", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with caplog.at_level(logging.INFO, "telegrad"):
        assert introspection_of(pair[0]).dump() is None
    (record,) = caplog.records
    assert "could not be written: [Errno 24] Too many open files: this process" in record.getMessage()
    assert "ulimit -n 4096" in record.getMessage()


def test_a_partly_written_dump_is_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def create(folder: Folder, name: str) -> io.BytesIO:
        (folder.path / name).write_bytes(b"half")
        return Half()

    monkeypatch.setenv(introspection.VARIABLE, str(tmp_path))
    monkeypatch.setattr(Folder, "create", create)
    with pytest.raises(OSError, match="No space"):
        introspection.write_dump("w0", "because", {})
    assert list(tmp_path.iterdir()) == []


def test_threads_of_libraries_stand_at_no_line_of_the_program(pair: list[Worker]) -> None:
    waiting: queue.Queue[None] = queue.Queue()
    library = threading.Thread(target=waiting.get, name="of a library", daemon=True)
    library.start()
    try:
        threads = {each["name"]: each for each in introspection_of(pair[0]).account()["threads"]}
        assert threads["of a library"]["at"] is None
        at = threads["MainThread"]["at"]  # the thread that asks has a line, too
        assert at is not None
        assert at["function"] == "test_threads_of_libraries_stand_at_no_line_of_the_program"
    finally:
        waiting.put(None)
        library.join()


def test_a_timeout_writes_a_dump(pair: list[Worker], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(introspection.VARIABLE, str(tmp_path))
    written = threading.Event()
    reasons: list[str] = []

    def write(reason: str) -> None:
        reasons.append(reason)
        written.set()

    monkeypatch.setattr(introspection_of(pair[0])._dumper, "write", write)
    monkeypatch.setattr(introspection_of(pair[0])._dumper, "_next", 0.0)
    gate.clear()
    with pytest.raises(CallTimeout):
        pair[0].agent.call("w1", wait_here, None, None, 0.05)
    assert inside.acquire(timeout=PATIENCE)
    assert written.wait(PATIENCE)
    gate.set()
    assert reasons == [f"a call of {__name__}.wait_here on worker 'w1' ran out of time"]


def test_a_file_above_the_size_limit_is_not_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(200 << 30)  # a sparse file
    with pytest.raises(UsageError, match="it is larger than 32 MiB"):
        DumpFiles([path])


# What a worker tells of its process


def test_a_worker_tells_its_processor_time(pair: list[Worker]) -> None:
    told = introspection_of(pair[0])
    before = told.account()
    until = process_time() + 0.05
    while process_time() < until:
        pass
    after = told.account()
    assert 0.05 <= after["processor"] - before["processor"] < 60
    assert after["devices"] == {} or torch.cuda.is_initialized()


@pytest.mark.parametrize("debug", [False, True])
def test_references_are_told_by_type_and_age(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if debug:
        monkeypatch.setenv("TELEGRAD_DEBUG", "1")
    with agents_here(2) as (one, two):
        kept = [rpc.remote("w1", torch.ones, (2,)) for _ in range(3)]
        own = rpc.RRef({"a": 1})
        for ref in kept:
            ref.to_here()
        held = {each["kind"]: each for each in introspection_of(one).account()["kinds"]}
        assert {kind: each["number"] for kind, each in held.items()} == {"value of w1": 3, "dict": 1}
        assert all(0 < each["age"] < 60 for each in held.values())
        assert all(("test_witness.py:" in each["line"]) == debug for each in held.values())
        (owned,) = introspection_of(two).account()["kinds"]
        assert (owned["kind"], owned["number"], owned["line"]) == ("torch.Tensor", 3, "")
        assert 0 < owned["age"] < 60
        del kept, own, ref


def test_the_latest_warnings_are_told_without_secrets(pair: list[Worker]) -> None:
    told = introspection_of(pair[0])
    told.account()
    root_handlers, log = logging.getLogger().handlers.copy(), logging.getLogger("telegrad")
    for number in range(process_state.LINES + 5):
        log.warning("number %d", number)
    log.info("not told")
    text = "token=abc, password: 'xy', redis://me:pw@host:1/2 and http://a:8080/b %s"
    logging.getLogger("train").error(text, "z" * 999)
    found = told.account()["log"]
    assert len(found) == process_state.LINES
    assert [each["text"] for each in found[:2]] == ["number 6", "number 7"]
    last = found[-1]
    assert (last["level"], last["logger"]) == ("ERROR", "train")
    assert last["text"].startswith("token=***, password: '***', redis://me:***@host:1/2 and http://a:8080/b zzz")
    assert len(last["text"]) == process_state.LONGEST_LINE + 3
    assert logging.getLogger().handlers == root_handlers


def test_the_traffic_of_observers_is_left_out() -> None:
    def traffic() -> list[tuple[int, int, int]]:
        accounts, _ = introspection_of(workers[0]).look()
        return [(sum(own["bytes_out"].values()), sum(own["bytes_in"].values()), own["calls_done"]) for own in accounts]

    with agents_here(2) as workers:
        rpc.rpc_sync("w1", abs, (-1,))
        traffic()
        before = traffic()
        for _ in range(5):
            traffic()
        assert traffic() == before
        rpc.rpc_sync("w1", abs, (-1,))
        (out, _, _), (_, come, calls) = traffic()
    assert 0 < out - before[0][0] == come - before[1][1] < 500
    assert calls - before[1][2] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be forked here")
@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_stacks_are_read_except_in_a_child(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    told = sys._current_frames

    def tell() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        if not (child := os.fork()):
            os._exit(gc.isenabled() != enabled or sys.getswitchinterval() != interval)
        assert os.waitpid(child, 0)[1] == 0
        return told()

    monkeypatch.setattr(sys, "_current_frames", tell)
    was, interval = gc.isenabled(), sys.getswitchinterval()
    (gc.enable if enabled else gc.disable)()
    try:
        assert threading.get_ident() in process_state.all_stacks()
        assert seen == [False]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
