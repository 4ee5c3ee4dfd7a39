"""Findings from made-up states of waiting groups."""

import json
import random
import re
import threading
from typing import Any

import pytest

from telegrad.insight.history import GroupSnapshot
from telegrad.insight.phrases import NOTE, Finding, doing, seconds, several
from telegrad.insight.report import Report, status
from telegrad.reporting import JOINING, LEAVING, MOVES, SourceLine, ThreadState, WaitState, WorkerState
from telegrad.reporting.observer import Observer
from tests.insight.scenes import QUEUED, UNFINISHED, Scene, wait

SLEEPS = "gate.wait()"
ASKED = WaitState(what="asks", on=[], about="", age=0.0)


@pytest.fixture
def one() -> Scene:
    return Scene("worker0")


@pytest.fixture
def two() -> Scene:
    return Scene("worker0", "worker1")


@pytest.fixture
def three() -> Scene:
    return Scene("worker0", "worker1", "worker2")


def only(
    scene: Scene, kind: str, *workers: str, title: str = "", told: str = "", waiting: Any = None, status: int = -1
) -> tuple[Finding, str]:
    """Return the single finding, whose cause is at these workers, and the whole text; check the words in them."""
    report = Report(scene.sight)
    found, text = report.findings, report.text(stacks=True)
    print(text)
    assert [(finding.kind, finding.workers) for finding in found] == [(kind, [*workers])]
    assert all(len(line) <= 100 for line in text.splitlines())
    json.dumps(report.as_json())
    text = " ".join(text.split())
    assert title in found[0].title
    assert told in text
    assert waiting is None or type(waiting)(found[0].waiting) == waiting
    assert status in (-1, report.status)
    return found[0], text


def kinds(scene: Scene) -> list[str]:
    report = Report(scene.sight)
    print(report.text())
    return [finding.kind for finding in report.findings]


def test_an_endless_loop_at_the_end_of_a_chain(three: Scene) -> None:
    main = three.thread("worker0", "train.py:9 main: rpc.rpc_sync('worker1', relay)")
    relay = three.call("worker0", "worker1", "train.relay", 3.1, by=main, runs="train.py:14 relay: return f.wait()")
    three.call("worker1", "worker2", "train.spin", 3, by=relay, runs="train.py:20 spin: while True:", asleep=False)
    finding, told = only(three, "busy", "worker2")
    assert finding.waiting == ["worker1", "worker0"]
    assert told.index("worker1, in train.relay for worker0, waits") < told.index("worker0's main thread waits")


def test_a_cancelled_call_that_still_runs_and_the_thread_that_asks(two: Scene) -> None:
    two.thread("worker0", "train.py:9 main: print(insight.why())", wait=ASKED, asleep=False)
    two.call("worker0", "worker1", "time.sleep", 1.2, runs="train.py:3 nap: gate.wait()")
    two["worker0"]["calls_out"].clear()
    two["worker1"]["calls_in"][0]["cancelled"] = True
    told = " ".join(Report(two.sight).text().split())
    assert "0 calls in flight, 1 cancelled call still runs; no thread is busy" in told
    assert "worker0: main thread asks for this report, at train.py:9 in main" in told
    assert "worker1: runs 1 call: time.sleep of worker0 (cancelled), for 1.2 s" in told


def test_the_report_knows_the_thread_that_asks() -> None:
    waits = [thread["wait"] for thread in Observer("w").account()["threads"] if thread["name"] == "MainThread"]
    assert [each and each["what"] for each in waits] == ["asks"]


def test_threads_of_other_programs_are_no_waits_but_may_hold_a_lock(three: Scene) -> None:
    own = {"name": "IPythonHistorySavingThread", "inside": ["/usr/lib/python3/threading.py:629 wait"]}
    for name in ("worker0", "worker1"):
        three.thread(name, "train.py:9 main: input()")
        three.thread(name, "history.py:8 run: self.save_flag.wait()", **own)
    assert Report(three.sight).findings[0].kind == "barrier"
    for name in ("worker0", "worker1"):
        three[name]["threads"][1]["foreign"] = True
    assert Report(three.sight).findings == []
    three.call("worker1", "worker0", "train.log", 3, runs="train.py:4 log: with guard:")
    three["worker0"]["threads"][1]["holds"] = ["guard"]
    assert "worker0's thread IPythonHistorySavingThread" in only(three, "lock", "worker0")[1]


def test_the_report_marks_daemon_threads_without_code_of_the_program() -> None:
    gate, ready = threading.Event(), threading.Event()

    def own() -> None:
        ready.set()
        gate.wait()

    waits = [threading.Thread(target=target, daemon=True) for target in (gate.wait, own)]
    for thread in waits:
        thread.start()
    ready.wait()
    try:
        known = {each["number"]: each.get("foreign", False) for each in Observer("w").account()["threads"]}
        assert [known[thread.ident or 0] for thread in waits] == [True, False]
    finally:
        gate.set()


def test_a_silent_worker_without_waiting_workers(one: Scene) -> None:
    one.silent["worker1"] = "its interpreter is held"
    only(one, "silent", "worker1")


def _tell(account: WorkerState, **more: Any) -> None:
    account.update(more)  # type: ignore[typeddict-item]


def joining(*names: str, size: int | None, missing: list[str]) -> Scene:
    scene = Scene(*names)
    for name in names:
        _tell(scene[name], phase=JOINING, phase_age=12.0, size=size, missing=missing, members={})
        scene.thread(name, "train.py:5 main: rpc.init_rpc(name)", wait=wait("init_rpc", *missing))
    return scene


def test_a_worker_that_moves_to_the_next_generation_without_another() -> None:
    scene = Scene("a")
    scene.thread("a", "train.py:8 main: rpc.rendezvous_again()", wait=wait(MOVES, "b", about="runs until 'b'", age=5.0))
    scene.silent["b"] = "its process is stopped"
    assert "a's main thread moves to the next generation, and waits for b, for 5.0 s" in only(scene, "silent", "b")[1]
    scene.silent.clear()
    scene["a"]["threads"][0]["wait"] = wait(MOVES, about="1 worker of 2 joined: 'a'", age=5.0)
    assert "moves to the next generation, and waits for 1 worker of 2 joined: 'a'" in only(scene, "wait", "a")[1]


def test_sizes_that_differ() -> None:
    scene = joining("worker0", "worker1", size=3, missing=["rank 2"])
    scene["worker1"]["size"] = 2
    assert "worker0 expects 3 workers and worker1 expects 2 workers" in only(scene, "sizes", "worker0", "worker1")[1]


def test_a_worker_that_waits_alone_for_an_elastic_group() -> None:
    scene = joining("worker0", size=None, missing=[])
    scene["worker0"]["threads"][0]["wait"] = wait("init_rpc", about="1 worker of 2 to 3 joined: 'worker0'")
    assert "worker0 cannot join yet: 1 worker of 2 to 3 joined: 'worker0'." in only(scene, "missing", "worker0")[1]


def test_workers_outside_of_the_running_generation_are_noted() -> None:
    scene = joining("a", "b", size=None, missing=[])
    about = "generation 2 is running until 't0', 't1' call rendezvous_again(), or one of them is lost"
    for name in ("a", "b"):
        scene[name]["threads"][0]["wait"] = wait("next generation", "t0", "t1", about=about, age=12.0)
    finding, told = only(scene, "wait", "a", "b")
    assert (finding.weight, status([finding])) == (NOTE, 0)
    assert f"Note: a and b wait for the next generation: {about}." in told
    assert "a and b: main thread waits for the next generation, while that of t0 and t1 is running, for 12 s" in told
    assert not re.search("None|missing|joined|Check", told)
    _tell(scene["b"], missing=["t1"])
    scene["b"]["threads"][0]["wait"] = wait("init_rpc", "t1", about="the directory of the group does not answer")
    assert {(each.kind, *each.workers) for each in Report(scene.sight).findings} == {("wait", "a"), ("missing", "b")}


@pytest.mark.parametrize(
    ("size", "missing", "about", "title"),
    [
        (None, ["rank 0"], "the name 'a' is not known yet", "worker0 cannot join yet: the name 'a' is not known yet."),
        (None, ["rank 0"], "", "No store answers at tcp://127.0.0.1:29500, it seems: worker0 cannot join."),
        (2, [], "all have joined", "worker0 cannot join yet: all have joined."),
        (4, ["rank 2", "w1"], "", "rank 2 and w1 are missing: the group of 4 cannot form."),
    ],
)
def test_only_what_a_worker_tells_is_missing(size: int | None, missing: list[str], about: str, title: str) -> None:
    scene = joining("worker0", size=size, missing=missing)
    scene["worker0"]["rank"] = 3
    scene["worker0"]["threads"][0]["wait"] = wait("init_rpc", *missing, about=about)
    assert [each.title for each in Report(scene.sight).findings] == [title]


def test_workers_that_start() -> None:
    scene = joining("driver", "worker1", size=3, missing=["worker0", "worker1"])
    _tell(scene["worker1"], missing=["rank 0", "rank 2"])
    assert "others are starting still" not in only(scene, "missing", "worker0")[1]
    _tell(scene["driver"], phase_age=2.0)
    _tell(scene["worker1"], phase_age=0.1)
    assert "others are starting still" in only(scene, "missing", "worker0")[1]
    _tell(scene["driver"], size=2)
    _tell(scene["worker1"], size=2)
    assert Report(scene.sight).findings == []


def test_a_barrier_that_a_dead_worker_does_not_reach(three: Scene) -> None:
    for name in ("worker0", "worker1", "worker2"):
        three.thread(name, "train.py:40 step: dist.barrier()")
    three["worker1"]["gone"] = {"worker3": "its process ended"}
    assert "worker3 is no longer in the group: its process ended" in only(three, "barrier", "worker3")[1]


def test_a_barrier_that_an_unknown_worker_does_not_reach(two: Scene) -> None:
    for name in ("worker0", "worker1"):
        two.thread(name, "train.py:4 step: b.barrier()", wait=wait("barrier", "worker2", about="barrier of all", age=9))
    assert "nothing is known about worker2" in only(two, "barrier", "worker2")[1]


def test_a_backward_pass_that_no_worker_runs(two: Scene) -> None:
    two.thread("worker0", "train.py:9 main: dist_autograd.backward(c, [loss])", wait=wait("backward"))
    two["worker0"]["passes"].append({"context": 7, "number": 1, "age": 6.5, "owing": ["worker1"]})
    only(two, "backward", "worker1")


def test_a_backward_pass_that_waits_for_a_silent_worker(one: Scene) -> None:
    one.thread("worker0", "train.py:9 main: dist_autograd.backward(c, [loss])", wait=wait("backward", "worker1"))
    one["worker0"]["passes"].append({"context": 7, "number": 1, "age": 6.5, "owing": ["worker0", "worker1"]})
    one.silent["worker1"] = "its process has ended"
    only(one, "silent", "worker1", waiting=["worker0"])


def leaving(place: str, **more: Any) -> Scene:
    scene = Scene("worker0", "worker1", "worker2")
    for name in ("worker0", "worker1"):
        _tell(scene[name], phase=LEAVING, phase_age=20.0, missing=["worker2"])
        scene.thread(name, "train.py:70 main: rpc.shutdown()", wait=wait("shutdown", "worker2"))
    scene.thread("worker2", place, **more)
    return scene


def test_servers_that_wait_for_a_working_driver_are_no_hang() -> None:
    finding, told = only(leaving("train.py:33 main: loss = model(x)", asleep=False), "shutdown", "worker2")
    assert status([finding]) == 0
    assert told.startswith("Nothing waits for long.")


def test_a_driver_that_calls_now_and_then_is_no_hang() -> None:
    scene = leaving(f"train.py:33 main: {SLEEPS}")
    _tell(scene["worker2"], idle=5.0)  # its last call was after the others began to wait
    finding, told = only(scene, "shutdown", "worker2")
    assert status([finding]) == 0
    assert "worker2 is busy, and has not called shutdown yet; others have, and serve calls meanwhile" in told
    _tell(scene["worker2"], idle=30.0)
    only(scene, "shutdown", "worker2", status=1)


def test_serving_workers_are_no_hang(two: Scene) -> None:
    two.thread("worker0", f"train.py:9 main: {SLEEPS}")
    two.thread("worker1", wait=wait("serve", about="calls of others"))
    assert Report(two.sight).findings == []
    assert "worker1: main thread serves the others" in Report(two.sight).text()


def test_a_serving_worker_that_delays_a_shutdown_is_not_said_to_be_late() -> None:
    scene = leaving("train.py:70 main: serve()", wait=wait("serve"))
    only(scene, "shutdown", "worker2", status=0, told="worker2 serves, and others wait for it.")
    scene.call("worker0", "worker2", "train.f", 8, runs=f"train.py:60 f: {SLEEPS}")
    assert "called shutdown" not in only(scene, "asleep", "worker2")[1]


def test_a_restarted_worker_is_not_gone(two: Scene) -> None:
    two["worker0"]["gone"] = {"worker1": "its process ended", "worker2": "its process ended"}
    (finding,) = Report(two.sight).findings
    assert finding.workers == ["worker2"]


def test_a_checkpoint_that_waits_for_a_worker(two: Scene) -> None:
    two.thread("worker0", "train.py:9 main: checkpoint.save(m, path)", wait=wait("checkpoint.save", "worker1", age=9))
    two.call("worker0", "worker1", "telegrad.checkpoint.write", 9, runs="disk.py:20 write: os.fsync(file)")
    only(two, "asleep", "worker1", waiting=["worker0"], told="checkpoint.save(m, path)")


def test_a_shutdown_that_waits_for_a_call() -> None:
    scene = leaving("train.py:70 main: rpc.shutdown()", wait=wait("shutdown", "worker0"))
    _tell(scene["worker2"], phase=LEAVING, phase_age=20.0, missing=["worker0"])
    scene.call("worker0", "worker2", "train.slow", 30, runs=f"train.py:20 slow: {SLEEPS}")
    finding, told = only(scene, "asleep", "worker2")
    assert "worker2 runs train.slow, for 30 s, and sleeps" in told
    assert set(finding.waiting) == {"worker0", "worker1", "worker2"}


def test_a_caller_at_the_limit_of_calls_in_flight(two: Scene) -> None:
    two.thread("worker0", "train.py:9 main: rpc.rpc_async('worker1', f)", wait=wait("room", "worker1", age=3.0))
    for _ in range(20):
        two.call("worker0", "worker1", "train.f", 4, runs="train.py:20 f: gate.wait()")
    assert kinds(two) == ["asleep", "room"]
    told = " ".join(Report(two.sight).text().split())
    assert "(and 19 more like it)" in told
    assert "the limit of calls in flight to worker1" in told


def test_a_lost_worker_that_others_wait_for() -> None:
    scene = leaving("train.py:33 main: input()")
    del scene.accounts["worker2"]
    for name in ("worker0", "worker1"):
        scene[name]["gone"] = {"worker2": "its process ended"}
    finding, told = only(scene, "gone", "worker2")
    assert "worker2 is no longer in the group (its process ended), and others still wait for it." in told
    assert status([finding]) == 1


def test_a_lost_worker_that_no_other_waits_for(one: Scene) -> None:
    one["worker0"]["gone"] = {"worker1": "left early"}
    only(one, "gone", "worker1", status=0, told="Note: worker1 is no longer in the group: left early.")


def test_generations_that_differ(three: Scene) -> None:
    three["worker2"]["generation"] = 2
    only(three, "generations", "worker2", told="worker0 and worker1 in generation 1; worker2 in generation 2", status=0)


def test_a_lock_with_an_unknown_holder(one: Scene) -> None:
    one.thread("worker0", "train.py:9 main: self.lock.acquire()")
    assert "self.lock" in only(one, "lock", "worker0")[0].title


def test_a_lock_that_a_thread_takes_twice(one: Scene) -> None:
    one.thread("worker0", "train.py:9 update: with lock:", holds=["lock"])
    one.thread("worker0", f"train.py:30 prefetch: {SLEEPS}", name="prefetch")
    assert "the thread that holds it (lock) waits for it, too" in only(one, "lock deadlock", "worker0")[0].title


def test_a_lock_is_held_inside_of_its_with_statement(one: Scene) -> None:
    one.thread("worker0", "train.py:9 update: with lock:")
    one.thread("worker0", f"train.py:30 prefetch: {SLEEPS}", name="prefetch")
    one.thread("worker0", "data.py:5 collect: lock.wait()", name="collector", holds=["lock"])
    one.thread("worker0", f"data.py:9 save: {SLEEPS}", name="saver", holds=["file", "lock"])
    only(one, "lock", "worker0", title="(lock) that another thread holds, it seems: worker0's thread saver is in save")


def test_locks_of_two_objects_with_the_same_name(one: Scene) -> None:
    one.thread("worker0", "train.py:9 update: with self.lock:", objects={"self.lock": 1})
    one.thread("worker0", f"data.py:9 save: {SLEEPS}", holds=["self.lock"], objects={"self.lock": 2})
    assert "(self.lock); its holder is not known" in only(one, "lock", "worker0")[0].title


def test_a_lock_of_logging() -> None:
    scene, file = Scene("worker0"), "/usr/lib/python3.13/logging/__init__.py"
    scene.thread("worker0", "train.py:9 update: log.info('loss')", inside=[f"{file}:1026 handle"])
    scene.thread("worker0", f"sink.py:5 emit: {SLEEPS}", name="sender", outside=[f"{file}:1028 handle"])
    finding, _ = only(scene, "lock", "worker0")
    assert "(logging's) that another thread holds, it seems: worker0's thread sender is in emit" in finding.title


def test_a_coroutine_that_blocks_the_event_loop(two: Scene) -> None:
    two.call("worker0", "worker1", "train.load", 6, runs=f"train.py:9 load: {SLEEPS}")
    two.call("worker0", "worker1", "f", 5, runs="train.py:2 f: def f():", state=UNFINISHED, wait=wait("begin", age=5))
    two.call("worker0", "worker1", "train.g", 5, runs="train.py:30 g: await ready()", state=UNFINISHED)
    for thread, name in zip(two["worker1"]["threads"], ("telegrad-asyncio", "coroutine", "coroutine"), strict=True):
        thread["name"] = name
    finding, told = only(two, "loop", "worker1")
    assert "The event loop of worker1 is blocked, it seems: worker1 runs train.load, for 6.0 s, and" in finding.title
    assert "worker0 called train.g on worker1 5.0 s ago, and no thread waits for it" in told
    two.thread("worker0", "train.py:9 main: asyncio.run(f())", inside=["/lib/asyncio/base_events.py:640 run_forever"])
    assert "no thread waits for it" not in only(two, "loop", "worker1")[1]


def test_coroutines_at_one_line_are_counted_as_such(two: Scene) -> None:
    for _ in range(2):
        two.call("worker0", "worker1", "train.g", 5, runs="train.py:30 g: await ready()", state=UNFINISHED)
    for thread in two["worker1"]["threads"]:
        thread["name"] = "coroutine"
    assert "2 coroutines run train.g, for 5.0 s" in only(two, "asleep", "worker1")[0].title


def test_a_callback_that_does_not_end(one: Scene) -> None:
    one.thread("worker0", "train.py:9 main: doubled.wait()", wait=wait("future", about="a future", age=5))
    one.thread("worker0", f"train.py:20 double: {SLEEPS}", name="telegrad-worker")
    finding, _ = only(one, "asleep", "worker0")
    assert "A thread waits for this one, it seems: worker0's thread telegrad-worker is in double" in finding.title


@pytest.mark.parametrize(("more", "kind"), [({}, "unfinished"), ({"runs": f"train.py:20 serve: {SLEEPS}"}, "asleep")])
def test_calls_of_a_worker_to_itself_do_not_wait_for_each_other(one: Scene, more: dict[str, str], kind: str) -> None:
    for age in (3.0, 2.99):  # two of a loop
        one.call("worker0", "worker0", "train.serve", age, state=UNFINISHED, **more)
    only(one, kind, "worker0")


def test_locks_taken_in_both_orders(one: Scene) -> None:
    one.thread("worker0", "train.py:9 main: with first_lock:")
    one.thread("worker0", "train.py:33 collect: with second_lock:", name="collector")
    only(one, "lock deadlock", "worker0")


def test_a_with_statement_that_takes_no_lock(one: Scene) -> None:
    one.thread("worker0", "train.py:9 main: with open(path) as file:")
    one.thread("worker0", "train.py:10 main: with condition:", name="other", asleep=False)
    assert Report(one.sight).findings == []


def test_a_group_without_problems(two: Scene) -> None:
    main = two.thread("worker0", "train.py:9 main: rpc.rpc_sync('worker1', work)")
    two.call("worker0", "worker1", "train.work", 0.02, by=main, runs="train.py:20 work: x = x @ x", asleep=False)
    report = Report(two.sight)
    told = " ".join(report.text().split())
    assert (report.findings, report.status) == ([], 0)
    assert told.startswith(
        "Nothing waits for long. 2 workers asked, all answered; 1 call in flight, the oldest for 0.0 s"
    )
    assert "busiest: work (train.py:20) on 1 thread" in told


def test_a_long_call_that_makes_short_calls(three: Scene) -> None:
    main = three.thread("worker0", "train.py:9 main: rpc.rpc_sync('worker1', epoch)")
    epoch = three.call("worker0", "worker1", "train.epoch", 30, by=main, runs="train.py:20 epoch: step()")
    three.call("worker1", "worker2", "train.step", 0.01, by=epoch, runs="train.py:40 step: loss = f(x)", asleep=False)
    assert "makes one short call after another, now train.step on worker2" in only(three, "asleep", "worker1")[1]


def test_a_call_that_has_not_arrived(two: Scene) -> None:
    main = two.thread("worker0", "train.py:9 main: rpc.rpc_sync('worker1', work)")
    two.call("worker0", "worker1", "train.work", 4, by=main, lost=True)
    finding, told = only(two, "underway", "worker1")
    assert finding.title.startswith("worker1 has no record of a call of train.work that worker0 made 4.0 s ago")
    assert "it seems that the call has not arrived" in told


def test_calls_to_a_group_that_a_thread_waits_for_one_by_one(three: Scene) -> None:
    main = three.thread("worker0", "train.py:9 main: rpc.group().rpc_sync(act)")
    for worker, by in (("worker1", main), ("worker2", None)):
        three.call("worker0", worker, "train.act", 9, by=by, runs=f"train.py:20 act: {SLEEPS}")
    told = Report(three.sight).text()
    assert "worker0 called train.act on worker2" in told
    assert "no thread waits" not in told
    three.call("worker0", "worker2", "train.other", 9, runs=f"train.py:30 other: {SLEEPS}")
    assert "no thread waits for it" in Report(three.sight).text()


def test_an_actor_whose_turn_does_not_end(two: Scene) -> None:
    main = two.thread("worker0", "train.py:9 main: counter.rpc_sync().get()")
    two.call("worker0", "worker1", "train.Counter.add", 9, runs=f"train.py:20 add: {SLEEPS}")
    two.call("worker0", "worker1", "train.Counter.get", 8, by=main, state=QUEUED)
    only(two, "asleep", "worker1", title="train.Counter.add", told="counter.rpc_sync().get()")


def test_callers_of_actors_that_wait_for_each_other_are_not_in_the_circle() -> None:
    scene = Scene("driver", "worker0", "worker1")
    for me, other in (("worker0", "worker1"), ("worker1", "worker0")):
        go = scene.call("driver", me, "train.Box.go", 9, runs="train.py:20 go: other.rpc_sync().get()")
        scene.call(me, other, "train.Box.get", 8, by=go, state=QUEUED)
    finding, _ = only(scene, "deadlock", "worker0", "worker1")
    assert finding.title == "Deadlock, it seems: worker0 and worker1 wait for each other."
    assert finding.waiting == ["driver"]


def test_no_worker_could_be_asked() -> None:
    report = Report(GroupSnapshot([], {}))
    assert report.status == 2
    assert "No worker could be asked" in report.text()


def test_the_most_important_finding_comes_first() -> None:
    scene = leaving("train.py:33 main: input()")
    main = scene.thread("worker1", "train.py:80 side: rpc.rpc_sync('worker8', f)", name="side")
    scene.call("worker1", "worker8", "train.f", 2, by=main)
    scene.silent["worker8"] = "stopped (SIGSTOP)"
    assert kinds(scene) == ["silent", "shutdown"]


def test_workers_in_the_same_state_share_a_line() -> None:
    names = [f"worker{rank}" for rank in range(300)]
    scene = Scene(*names)
    for name in names:
        scene.thread(name, "train.py:70 main: rpc.shutdown()", wait=wait("serve"))
    told = Report(scene.sight).text()
    assert "worker0, worker1, worker2, worker3, worker4, worker5, worker6 and 293 others" in told
    assert len(told.splitlines()) < 8


def test_a_backward_pass_that_no_thread_waits_for(two: Scene) -> None:
    two["worker0"]["passes"].append({"context": 7, "number": 1, "age": 6.5, "owing": ["worker1"]})
    outside = ["/lib/torch/autograd/graph.py:823 _engine_run_backward"]
    main = two.thread("worker0", "train.py:9 main: print(loss)", asleep=False)
    hook = two.thread("worker1", "train.py:50 hook: rpc.rpc_sync('worker0', note)", outside=outside)
    two.call("worker1", "worker0", "train.note", 6.4, by=hook, runs=f"train.py:60 note: {SLEEPS}")
    finding, told = only(two, "asleep", "worker0")
    assert "worker0 drives a backward pass of context 7, for 6.5 s" in told
    assert main
    assert "worker1" in finding.waiting


def test_a_value_that_nothing_makes(two: Scene) -> None:
    main = two.thread("worker0", "train.py:9 main: reference.to_here()")
    two.call("worker0", "worker1", "to_here() of a reference", 5, by=main, state=UNFINISHED)
    assert "nothing there seems to create it" in only(two, "value", "worker1")[0].title


def test_a_value_that_its_owner_waits_for(two: Scene) -> None:
    two.thread("worker0", "train.py:9 main: reference.to_here()", wait=wait("value", age=5))
    two.call("worker1", "worker0", "train.make", 6, runs=f"train.py:20 make: {SLEEPS}")
    finding, told = only(two, "value", "worker0")
    assert "worker0's main thread waits for the value of a reference, for 5.0 s" in told
    assert finding.waiting == ["worker1", "worker0"]


def test_slots_that_are_taken_by_short_calls() -> None:
    scene = Scene("worker0", "worker1", slots=1)
    scene.call("worker0", "worker1", "train.quick", 0.1, runs="train.py:20 quick: x = x @ x", asleep=False)
    for _ in range(40):
        scene.call("worker0", "worker1", "train.quick", 2)
    assert "by short calls, and more arrive than it can run: 40 calls wait" in only(scene, "slots", "worker1")[0].title


def test_a_stage_of_a_pipeline_that_sleeps(three: Scene) -> None:
    main = three.thread("worker0", "train.py:9 main: pipeline.forward_backward(context, x, y, loss)")
    three.call("worker0", "worker1", "stage 1 of 2 of a Pipeline (First)", 7, by=main, state=UNFINISHED)
    three.call("worker0", "worker2", "stage 2 of 2 of a Pipeline (Second)", 7, state=UNFINISHED)
    outside = ["/lib/telegrad/pipeline/stage_runner.py:120 _do"]
    three.thread("worker2", f"train.py:30 forward: {SLEEPS}", outside=outside, name="telegrad-worker")
    only(three, "asleep", "worker2", told="train.py:30 in forward", waiting={"worker0"})


def test_a_call_whose_thread_is_not_known(two: Scene) -> None:
    two.call("worker0", "worker1", "train.work", 3, state="running")
    assert "the thread that runs it is not known" in only(two, "busy", "worker1")[0].title


def test_several_threads_that_wait_for_a_lock(two: Scene) -> None:
    main = two.thread("worker1", "train.py:9 main: rpc.rpc_sync('worker0', add)")
    for _ in range(3):
        two.call("worker1", "worker0", "train.add", 9, by=main, runs="train.py:20 add: with table_lock:")
    two.thread("worker0", f"train.py:40 save: {SLEEPS}", name="saver")
    finding, told = only(two, "lock", "worker0")
    assert "3 threads of worker0 wait for a lock (table_lock) that another thread holds" in finding.title
    assert "worker0's thread saver is in save, and sleeps" in told


def test_a_stream_whose_reader_waits_for_another_one() -> None:
    scene = Scene("driver", "worker0", "worker1")
    main = scene.thread("driver", "train.py:9 main: [next(stream) for stream in streams]")
    scene.call("driver", "worker0", "train.games", 9, by=main, runs=f"train.py:4 games: {SLEEPS}")
    at = "train.py:5 games: yield 1"
    scene.call("driver", "worker1", "train.games", 9, runs=at, wait=wait("future", "driver", about="driver", age=9))
    assert only(scene, "asleep", "worker0")[0].waiting == ["driver", "worker1"]


def test_a_worker_that_waits_for_others_to_join(two: Scene) -> None:
    two.thread("worker0", "train.py:9 main: rpc.wait_for_workers(3)", wait=wait("workers", about="3 workers", age=9))
    assert "waits for 3 workers to join" in only(two, "wait", "worker0")[0].title


def test_a_member_without_a_report() -> None:
    scene = leaving("train.py:33 main: input()")
    del scene.accounts["worker2"]
    assert "nothing is known about it" in only(scene, "silent", "worker2")[0].title


def test_a_leaving_worker_without_work() -> None:
    scene = leaving("train.py:70 main: rpc.shutdown()", wait=wait("shutdown", age=0.1))
    _tell(scene["worker2"], phase=LEAVING, phase_age=0.1)
    assert Report(scene.sight).status == 0


def test_workers_that_do_not_report_what_they_wait_for() -> None:
    scene = leaving("train.py:33 main: input()")
    for name in ("worker0", "worker1"):
        scene[name]["missing"] = []
        scene[name]["threads"][0]["wait"] = wait("shutdown")
    only(scene, "shutdown", "worker2", waiting={"worker0", "worker1"})


@pytest.mark.parametrize(
    ("age", "said"),
    [
        (0.04, "0.0 s"),
        (12.3, "12 s"),
        (200, "3 min 20 s"),
        (7260, "2 h 1 min"),
        (119.6, "2 min 0 s"),
        (9.95, "10 s"),
        (7200, "2 h 0 min"),
    ],
)
def test_texts_of_durations(age: float, said: str) -> None:
    assert seconds(age) == said


def test_long_lists_are_cut() -> None:
    assert several("abcdefgh") == "a, b, c, d, e, f, g and h"
    assert several("abcdefghi") == "a, b, c, d, e, f, g and 2 others"


@pytest.mark.parametrize(
    ("line", "innermost", "asleep", "said"),
    [
        ("await gather(f(), sleep(0))", "train.py:9 main", True, "sleeps, in a wait outside Telegrad"),
        ("return await future", "/lib/asyncio/tasks.py:665 sleep", True, "sleeps"),
        ("", "", True, "sleeps, in a wait outside Telegrad"),
        ("", "", None, "has made no progress"),
        ("", "", False, "is busy now: it loops, it seems, or computes"),
        ("q.get()", "/lib/queue.py:3 get", True, "waits for something in its own process"),
        ("with lock:", "train.py:9 main", True, "waits for a lock (lock)"),
        ("async with lock: await f()", "train.py:9 main", True, "sleeps, in a wait outside Telegrad"),
        ("async with lock: await f()", "/lib/asyncio/locks.py:9 acquire", True, "waits for a lock (lock)"),
    ],
)
def test_what_threads_do(line: str, innermost: str, asleep: bool | None, said: str) -> None:
    at = SourceLine(file="train.py", line=9, function="main", text=line) if line else None
    stack = [innermost] if innermost else []
    name = "coroutine" if "await" in line else "main"
    assert doing(ThreadState(number=1, name=name, at=at, stack=stack, wait=None, asleep=asleep)) == said


@pytest.mark.parametrize("seed", range(100))
def test_random_states_have_a_report(seed: int) -> None:
    report = Report(at_random(random.Random(seed)).sight)
    told = report.text(stacks=True)
    assert all(len(line) <= 100 for line in told.splitlines()), told
    assert report.status in (0, 1, 2)
    json.dumps(report.as_json())


def at_random(chance: random.Random) -> Scene:
    names = [f"worker{rank}" for rank in range(chance.randint(1, 5))]
    strangers = [*names, "worker8", "worker9", "rank 3"]
    scene = Scene(*names, slots=chance.randint(1, 3))
    places = ["with lock:", SLEEPS, "dist.barrier()", "f.wait()", "x.acquire()", "pass", "reference.to_here()"]
    functions = ["train.f", "train.Box.get", "to_here() of a reference", "stage 1 of 2 of a Pipeline (A)", ""]
    waits = ["shutdown", "backward", "future", "value", "init_rpc", "room", "store", "workers", "else"]
    for name in names:
        for _ in range(chance.randint(0, 3)):
            own = wait(chance.choice(waits), *chance.sample(strangers, chance.randint(0, 2)), age=chance.choice([0, 5]))
            scene.thread(
                name,
                chance.choice(["", f"train.py:{chance.randint(1, 9)} step: {chance.choice(places)}"]),
                wait=chance.choice([None, own]),
                asleep=chance.choice([True, False, None]),
                outside=chance.choice(
                    [[], ["/lib/torch/autograd/graph.py:1 run"], ["/telegrad/pipeline/stage_runner.py:1 act"]]
                ),
            )
        for _ in range(chance.randint(0, 2)):
            owing = chance.sample(strangers, chance.randint(0, 3))
            scene[name]["passes"].append(
                {"context": 7, "number": chance.randint(1, 9), "age": chance.choice([0.1, 5]), "owing": owing}
            )
        phase = chance.choice(["member", "member", JOINING, LEAVING])
        _tell(scene[name], phase=phase, phase_age=chance.choice([0.1, 5]), size=chance.choice([None, 2, len(names)]))
        _tell(scene[name], missing=chance.sample(strangers, chance.randint(0, 2)), generation=chance.choice([1, 1, 2]))
        _tell(scene[name], gone=chance.choice([{}, {"worker9": "it died"}]), place=chance.choice(["", "hosta:1"]))
    for _ in range(chance.randint(0, 12)):
        caller, to = chance.choice(strangers), chance.choice(strangers)
        threads = [thread["number"] for thread in scene[caller]["threads"]] if caller in names else []
        more = {"runs": f"train.py:{chance.randint(1, 9)} f: {chance.choice(places)}"} if chance.random() < 0.5 else {}
        states: list[dict[str, Any]] = [{}, {"state": UNFINISHED}, {"state": QUEUED}, {"lost": True}]
        by = chance.choice([None, *threads])
        scene.call(
            caller, to, chance.choice(functions), chance.choice([0.1, 3, 5]), by=by, **more, **chance.choice(states)
        )
    scene.silent.update(chance.choice([{}, {}, {"worker8": "stopped"}]))
    return scene


def test_many_workers_that_wait_at_different_lines() -> None:
    names = [f"worker{rank}" for rank in range(10)]
    scene = Scene(*names)
    runs = "train.py:20 spin: while True:"
    for rank, name in enumerate(names[1:]):
        main = scene.thread(name, f"train.py:{rank} main: rpc.rpc_sync('worker0', spin)")
        scene.call(name, "worker0", "train.spin", 12 - rank / 10, by=main, runs=runs, asleep=False)
    assert "and 5 more wait for it: worker5, worker6, worker7, worker8 and worker9" in only(scene, "busy", "worker0")[1]


def test_busy_loops_in_two_threads(two: Scene) -> None:
    for asleep in (True, False):
        two.call("worker0", "worker1", "train.spin", 5, runs="train.py:20 spin: while True:", asleep=asleep)
    assert "2 threads run train.spin" in only(two, "busy", "worker1")[0].title


def slots_of_each_other() -> Scene:
    scene = Scene("worker0", "worker1", "worker2", slots=1)
    main = scene.thread("worker2", "train.py:9 main: rpc.rpc_sync('worker0', outer)")
    for callee, by in (("worker0", main), ("worker1", None)):
        scene.call("worker2", callee, "train.outer", 6, by=by, runs="train.py:20 outer: poll(task.done())")
    scene.call("worker1", "worker0", "train.leaf", 4)
    scene.call("worker0", "worker1", "train.leaf", 3)
    return scene


def meeting() -> Scene:
    scene = Scene("worker0", "worker1", "worker2")
    waits = wait("barrier", "worker2", "worker3", "worker4", about="barrier of all", age=9)
    for name in ("worker0", "worker1"):
        scene.thread(name, "train.py:40 step: everybody.barrier()", wait=waits)
    scene.thread("worker2", "train.py:50 load: read(file)", asleep=False)
    scene.silent["worker3"] = "stopped (SIGSTOP)"
    scene["worker0"]["gone"] = {"worker4": "worker 'worker4' left early"}
    return scene


def one_line() -> Scene:
    scene = Scene("worker0", "worker1", "worker2")
    for name in ("worker0", "worker1"):
        scene.thread(name, "train.py:40 step: dist.barrier()")
    scene.thread("worker2", "train.py:50 load: x = x + 1")
    return scene


def arrivals() -> Scene:
    scene = Scene("worker0", "worker1", "worker2", "worker3")
    for age, name in ((8, "worker0"), (7, "worker1")):
        main = scene.thread(name, "train.py:9 main: rpc.rpc_sync('worker3', arrive)")
        scene.call(name, "worker3", "train.arrive", age, by=main, runs="train.py:20 arrive: condition.wait()")
    scene.thread("worker2", f"train.py:50 load: {SLEEPS}")
    return scene


def nobody_of_that_name() -> Scene:
    scene = Scene("worker0", "worker1")
    scene.call("worker0", "worker8", "train.f", 3, by=scene.thread("worker0", "train.py:9 main: push()"))
    return scene


def two_calls(line: str, function: str, **more: Any) -> Scene:
    scene = Scene("worker0", "worker1")
    main = scene.thread("worker0", f"train.py:9 main: {line}")
    for age in (4, 3):  # the older first
        scene.call("worker0", "worker1", function, age, by=main, **more)
    return scene


TURNS = two_calls("box.rpc_sync().f()", "train.Box.f")
FUTURES = two_calls("rpc.rpc_sync('worker1', f)", "train.f", state=UNFINISHED)


def at_lines(count: int) -> Scene:
    scene = Scene(*(f"worker{rank}" for rank in range(count)), "spins")
    for rank in range(count):
        main = scene.thread(f"worker{rank}", f"train.py:{rank} main: rpc.rpc_sync('spins', spin)")
        scene.call(f"worker{rank}", "spins", "train.spin", 9, by=main, runs="train.py:20 spin: x += 1")
    return scene


def hook() -> Scene:
    scene = Scene("worker0", "worker1")
    scene["worker0"]["passes"].append({"context": 7, "number": 1, "age": 6.5, "owing": ["worker1"]})
    outside = ["/lib/torch/autograd/graph.py:823 _engine_run_backward"]
    scene.thread("worker1", f"train.py:50 hook: {SLEEPS}", outside=outside)
    return scene


def unmade_value() -> Scene:
    scene = Scene("worker0")
    scene.thread("worker0", "train.py:9 main: reference.to_here()", wait=wait("value", age=5))
    return scene


def no_store() -> Scene:
    scene = joining("worker1", "worker2", size=3, missing=[])
    scene["worker1"]["threads"][0]["wait"] = wait("store", about="the store at tcp://h:1, which")
    scene["worker1"]["place"] = ""
    return scene


def two_groups() -> Scene:
    scene = Scene("worker0", "worker1", "worker2")
    _tell(scene["worker2"], group="h", generation=2)
    scene.call("worker0", "worker1", "train.f", 3, state="running")
    return scene


def gathering() -> Scene:
    scene = leaving("train.py:33 main: input()")
    for name in ("worker0", "worker1"):
        scene[name]["threads"][0]["wait"] = wait("_all_gather", "worker2", age=4)
        _tell(scene[name], phase="member")
    _tell(scene["worker2"], idle=80.0)
    return scene


def brief(each: Finding) -> tuple[Any, ...]:
    threads = re.findall(r"\((\d+)\)", " ".join(each.stacks))
    names = " ".join(each.workers), " ".join(each.waiting)
    return (each.kind, each.weight, *names, each.age, len(each.details), " ".join(threads))


# The workers, those that wait, the age, the lines of details, and the threads of each finding.
FOUND: list[tuple[Scene, list[tuple[Any, ...]]]] = [
    (slots_of_each_other(), [("slot deadlock", 90, "worker0 worker1", "worker2", 6, 13, "3 5 1")]),
    (
        meeting(),
        [("silent", 95, "worker3", "", 0.0, 0, ""), ("barrier", 65, "worker2 worker3 worker4", "", 9, 6, "1 2")],
    ),
    (arrivals(), [("barrier", 65, "worker2", "worker0 worker1", 8, 6, "3 6 1 4")]),
    (one_line(), [("barrier", 10, "worker2", "", 0.0, 4, "1 2")]),
    (nobody_of_that_name(), [("unknown", 75, "worker8", "worker0", 3, 3, "1")]),
    (TURNS, [("turn", 35, "worker1", "worker0", 4, 2, "1")]),
    (FUTURES, [("unfinished", 50, "worker1", "worker0", 4, 3, "1")]),
    (at_lines(5), [("busy", 40, "spins", "worker0 worker1 worker2 worker3 worker4", 9, 11, "3 6 9 12 15 1 4 7 10")]),
    (
        at_lines(6),
        [("busy", 40, "spins", "worker0 worker1 worker2 worker3 worker4 worker5", 9, 10, "3 6 9 12 15 18 1 4 7 10")],
    ),
    (hook(), [("backward", 55, "worker1", "worker0", 6.5, 2, "1")]),
    (unmade_value(), [("value", 55, "worker0", "", 5, 1, "1")]),
    (
        no_store(),
        [("store", 85, "worker1", "worker1", 12.0, 4, "1"), ("missing", 80, "rank 0 rank 2", "worker2", 12.0, 3, "2")],
    ),
    (
        joining("worker0", "worker1", size=4, missing=[]),
        [("missing", 80, "rank 2 rank 3", "worker0 worker1", 12.0, 4, "1")],
    ),
    (
        joining("worker0", "worker1", size=4, missing=["rank 1", "rank 2"]),
        [("missing", 80, "rank 2", "worker0 worker1", 12.0, 3, "1")],
    ),
    (two_groups(), [("generations", 70, "worker2", "", 0.0, 1, ""), ("busy", 40, "worker1", "worker0", 3, 1, "")]),
    (gathering(), [("shutdown", 45, "worker2", "worker0 worker1", 4, 3, "3 1 2")]),
]


@pytest.mark.parametrize(("scene", "expected"), FOUND)
def test_findings(scene: Scene, expected: list[tuple[Any, ...]]) -> None:
    assert list(map(brief, Report(scene.sight).findings)) == expected


TEXTS: list[tuple[Scene, str]] = [
    (
        slots_of_each_other(),
        """\
3 workers asked, all answered; one cause of waits:

Deadlock through the slots of worker0 and worker1, it seems: the calls that hold them wait for calls
  that are queued for one.
  worker1 called train.leaf on worker0 4.0 s ago, where it is queued
  1 call to worker0 waits for a free slot there
  worker0, in train.outer for worker2, waits for calls, it seems, for 6.0 s, and waits for
    train.leaf on worker1, it seems
      train.py:20 in outer: poll(task.done())
  worker0 called train.leaf on worker1 3.0 s ago, where it is queued
  1 call to worker1 waits for a free slot there
  worker1, in train.outer for worker2, waits for calls, it seems, for 6.0 s, and waits for
    train.leaf on worker0, it seems
      train.py:20 in outer: poll(task.done())
  worker0 runs 1 call at once (num_worker_threads). Waiting in rpc_sync or for a call's future frees
    the slot; loops and other waits keep it
  worker1 runs 1 call at once (num_worker_threads). Waiting in rpc_sync or for a call's future frees
    the slot; loops and other waits keep it
  worker2's main thread waits for train.outer on worker0, for 6.0 s
      train.py:9 in main: rpc.rpc_sync('worker0', outer)
  worker2 called train.outer on worker1 6.0 s ago

What each worker does:
  worker0 and worker1: runs 1 call: train.outer of worker2, for 6.0 s; 1 call queued
  worker2: main thread waits for train.outer on worker0, for 6.0 s, at train.py:9 in main
""",
    ),
    (
        meeting(),
        """\
4 workers asked, 1 did not answer; 2 causes of waits, the most important first:

1. worker3 does not answer: stopped (SIGSTOP).

2. worker2, worker3 and worker4 have not arrived at barrier of all, where worker0 and worker1 wait.
   worker0's main thread waits for barrier of all, of worker2, worker3 and worker4, for 9.0 s
       train.py:40 in step: everybody.barrier()
   worker2's main thread is busy now: it loops, it seems, or computes
       train.py:50 in load: read(file)
   worker3 does not answer: stopped (SIGSTOP)
   worker4 is no longer in the group: left early

What each worker does:
  worker0 and worker1: main thread waits for barrier of all, of worker2, worker3 and worker4, for
    9.0 s, at train.py:40 in step
  worker2: main thread is busy now: it loops, it seems, or computes, at train.py:50 in load
  worker3: no answer
""",
    ),
    (
        arrivals(),
        """\
4 workers asked, all answered; one cause of waits:

worker2 has not arrived, it seems, where worker0 and worker1 wait for all workers.
  worker0 and worker1 are at the same line:
      train.py:20 in arrive: condition.wait()
  worker2's main thread sleeps, in a wait outside Telegrad
      train.py:50 in load: gate.wait()
  worker0's main thread waits for train.arrive on worker3, for 8.0 s (and 1 more like it: worker1)
      train.py:9 in main: rpc.rpc_sync('worker3', arrive)

What each worker does:
  worker0 and worker1: main thread waits for train.arrive on worker3, for 8.0 s, at train.py:9 in
    main (the first of them)
  worker2: main thread sleeps, in a wait outside Telegrad, at train.py:50 in load
  worker3: runs 2 calls, the longest train.arrive of worker0, for 8.0 s
""",
    ),
]


@pytest.mark.parametrize(("scene", "text"), TEXTS)
def test_whole_texts(scene: Scene, text: str) -> None:
    assert Report(scene.sight).text().replace("Files are under /home/ann/project/\n", "") == text
