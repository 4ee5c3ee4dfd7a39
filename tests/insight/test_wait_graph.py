"""What calls and threads wait for, in made-up states of groups."""

from typing import Any

import pytest

from telegrad.insight.wait_graph import CALL, PASS, SLOTS, THREAD, WORK, WORKER, Node, WaitGraph, lock_of
from telegrad.reporting import COROUTINE, LEAVING
from tests.insight.scenes import UNFINISHED, Scene, wait

LONG = 2.0  # waits of half of it are followed
IN_THREADING = ["/usr/lib/python3/threading.py:1100 wait"]
Shown = tuple[str, str, str, int, bool]  # why, and the kind, worker and number of the node; True for a guess


def pair(slots: int = 16) -> Scene:
    return Scene("w0", "w1", slots=slots)


@pytest.fixture
def scene() -> Scene:
    return pair()


def edges(scene: Scene, node: Node) -> list[Shown]:
    found = WaitGraph(scene.sight, LONG).edges(node)
    return [(edge.why, edge.to.kind, edge.to.worker, edge.to.number, edge.guess) for edge in found]


def of_call(scene: Scene, number: int = -1) -> list[Shown]:
    """Return the edges of a call of w0 to w1; by default of the last one."""
    out = scene["w0"]["calls_out"]
    return edges(scene, Node(CALL, "w0", out[-1]["number"] if number < 0 else number, out[-1]["to"]))


def of_thread(scene: Scene, number: int, worker: str = "w0") -> list[Shown]:
    return edges(scene, Node(THREAD, worker, number))


def starts(scene: Scene) -> list[tuple[str, int]]:
    return [(node.kind, node.number) for node in WaitGraph(scene.sight, LONG).starts]


# Calls


def test_a_call_to_an_unknown_worker_waits_for_that_worker(scene: Scene) -> None:
    scene.call("w0", "w8", "f", 3)
    assert of_call(scene) == [("call", WORKER, "w8", 0, False)]


@pytest.mark.parametrize(("slots", "queued", "found"), [(1, "w0", True), (2, "w0", False), (1, "w1", False)])
def test_a_call_that_is_not_listed_is_queued_if_others_of_its_caller_are(slots: int, queued: str, found: bool) -> None:
    scene = pair(slots)
    scene.call("w1", "w1", "f", 4, runs="train.py:3 f: x += 1")
    scene.call(queued, "w1", "f", 3)
    scene.call("w0", "w1", "f", 3, lost=True)
    assert of_call(scene) == [("slots", SLOTS, "w1", 0, False)] * found


def test_a_call_that_is_not_listed_beside_running_calls_of_its_caller_is_on_its_way() -> None:
    scene = pair(1)
    scene.call("w0", "w1", "f", 4, runs="train.py:3 f: x += 1")
    scene.call("w0", "w1", "f", 3, lost=True)
    assert of_call(scene) == []


def test_a_queued_call_waits_for_a_slot() -> None:
    scene = pair(1)
    scene.call("w1", "w1", "f", 4, runs="train.py:3 f: x += 1")
    scene.call("w0", "w1", "f", 3)
    assert of_call(scene) == [("slots", SLOTS, "w1", 0, False)]


@pytest.mark.parametrize(
    ("running", "ahead"),
    [
        (["train.Box.g", "train.Bag.g", "train.f"], [1]),  # of its own class
        (["train.Bag.g", "train.f"], [1]),  # methods
        (["train.f", "train.g"], [1, 3]),  # any
    ],
)
def test_a_call_waits_despite_free_slots_for_its_actor(scene: Scene, running: list[str], ahead: list[int]) -> None:
    for function in running:
        scene.call("w0", "w1", function, 4, runs="train.py:3 f: x += 1")
    scene.call("w0", "w1", "train.Bag.g", 0.9, runs="train.py:3 f: x += 1")  # too young
    scene.call("w0", "w1", "train.Box.f", 3)
    assert of_call(scene) == [("turn", CALL, "w0", number, True) for number in ahead]


def test_a_running_call_waits_for_its_thread(scene: Scene) -> None:
    runs = scene.call("w0", "w1", "f", 4, runs="train.py:3 f: x += 1")
    assert runs is not None
    assert of_call(scene) == [("runs", THREAD, "w1", runs, False)]


def test_a_call_of_a_meeting_waits_for_the_thread_that_knows_who_is_missing(scene: Scene) -> None:
    scene.thread("w0", "train.py:9 main: other()", wait=wait("barrier", "w1", about="another barrier"))
    meets = scene.thread("w0", "train.py:9 main: everybody.barrier()", wait=wait("barrier", "w1", about="the barrier"))
    scene.call("w0", "w1", "the barrier", 4, state=UNFINISHED)
    assert of_call(scene) == [("meeting", THREAD, "w0", meets, False)]
    scene["w0"]["threads"][1]["wait"] = wait("value", about="the barrier")
    assert of_call(scene) == []


def test_a_fetch_waits_for_calls_of_its_worker_that_may_make_the_value(scene: Scene) -> None:
    scene.call("w1", "w1", "make", 4, runs="train.py:3 f: x += 1")
    scene.call("w0", "w1", "make", 4, runs="train.py:3 f: x += 1")
    scene.call("w0", "w1", "to_here() of a reference", 3, state=UNFINISHED)
    first, own = (call["number"] for call in scene["w1"]["calls_in"][:2])
    assert of_call(scene) == [("value", CALL, "w0", own, True)]
    del scene["w1"]["calls_in"][1], scene["w0"]["calls_out"][0]
    assert of_call(scene) == [("value", CALL, "w1", first, True)]


@pytest.mark.parametrize(
    ("state", "age", "found"), [(UNFINISHED, 3.0, True), ("running", 3.0, False), (UNFINISHED, 3.2, False)]
)
def test_an_unfinished_call_waits_for_calls_of_its_function(scene: Scene, state: str, age: float, found: bool) -> None:
    scene.call("w0", "w1", "f", 3, state=state)
    scene.call("w1", "w8", "g", age)
    assert of_call(scene) == [("future", CALL, "w1", scene["w1"]["calls_out"][0]["number"], True)] * found


# Threads


@pytest.mark.parametrize(("age", "found"), [(1.0, True), (0.9, False)])
def test_a_thread_waits_for_its_calls(scene: Scene, age: float, found: bool) -> None:
    main = scene.thread("w0", "train.py:9 main: rpc.rpc_sync('w1', f)")
    scene.call("w0", "w1", "f", age, by=main)
    assert of_thread(scene, main) == [("call", CALL, "w0", 2, False)] * found


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("future.wait()", "MainThread", True),
        ("await future", "MainThread", True),
        ("x = x + 1", "MainThread", False),
        ("x = x + 1", COROUTINE, True),
    ],
)
def test_a_thread_may_wait_for_futures_by_its_line(scene: Scene, text: str, name: str, found: bool) -> None:
    main = scene.thread("w0", f"train.py:9 main: {text}", name=name)
    scene.call("w0", "w1", "f", 3)
    assert of_thread(scene, main) == [("future", CALL, "w0", 2, True)] * found


def test_a_thread_without_a_line_waits_for_nothing_that_is_known(scene: Scene) -> None:
    main = scene.thread("w0")
    scene.call("w0", "w1", "f", 3)
    assert of_thread(scene, main) == []


@pytest.mark.parametrize(
    ("text", "inside", "found"),
    [("thread.join()", IN_THREADING, True), ("thread.join()", [], False), ("x = x + 1", IN_THREADING, False)],
)
def test_a_thread_waits_for_one_that_waits_for_a_call(scene: Scene, text: str, inside: list[str], found: bool) -> None:
    main = scene.thread("w0", f"train.py:9 main: {text}", inside=inside)
    other = scene.thread("w0", "train.py:20 load: rpc.rpc_sync('w1', f)", name="loader")
    scene.thread("w0", "train.py:30 idle: gate.wait()", name="idle")
    scene.call("w0", "w1", "f", 3, by=other)
    assert of_thread(scene, main) == [("thread", THREAD, "w0", other, True)] * found


def test_a_thread_waits_for_its_passes_or_the_workers_that_owe_to_them(scene: Scene) -> None:
    main = scene.thread("w0", "train.py:9 main: autograd.backward(c, [loss])", wait=wait("backward", "w1"))
    assert of_thread(scene, main) == [("pass", WORK, "w1", 0, False)]
    scene["w0"]["passes"].append({"context": 7, "number": 5, "age": 3.0, "owing": ["w1"]})
    assert of_thread(scene, main) == [("pass", PASS, "w0", 5, False)]


@pytest.mark.parametrize("on", [(), ("w1",)])
def test_a_value_of_its_own_worker_is_made_by_another_call(scene: Scene, on: tuple[str, ...]) -> None:
    own = scene.call("w0", "w1", "f", 3, runs="train.py:3 f: rref.local_value()", wait=wait("value", *on))
    scene.call("w0", "w1", "g", 3, runs="train.py:8 g: x += 1")
    assert own is not None
    assert of_thread(scene, own, "w1") == [("value", CALL, "w0", scene["w1"]["calls_in"][1]["number"], True)]


def test_a_value_of_another_worker_is_waited_for_there(scene: Scene) -> None:
    main = scene.thread("w0", "train.py:9 main: rref.to_here()", wait=wait("value", "w0", "w1"))
    assert of_thread(scene, main) == [("value", WORKER, "w1", 0, False)]


def test_room_is_made_by_the_oldest_call(scene: Scene) -> None:
    main = scene.thread("w0", "train.py:9 main: rpc.rpc_async('w1', f)", wait=wait("room", "w1", "w8"))
    for age in (2, 4, 3):
        scene.call("w0", "w1", "f", age)
    assert of_thread(scene, main) == [("room", CALL, "w0", scene["w0"]["calls_out"][1]["number"], False)]
    assert WaitGraph(scene.sight, LONG).age(Node(THREAD, "w0", main)) == 4


def test_another_wait_may_be_for_futures_of_the_served_call_or_for_threads(scene: Scene) -> None:
    own = scene.call("w0", "w1", "f", 3, runs="train.py:3 f: checkpoint.save(state)", wait=wait("save"))
    callback = scene.thread("w1", "train.py:30 done: gate.wait()", name="telegrad-callbacks")
    assert own is not None
    assert of_thread(scene, own, "w1") == [("thread", THREAD, "w1", callback, True)]
    scene.call("w1", "w8", "old", 3.2)  # before the served call began
    assert of_thread(scene, own, "w1") == [("thread", THREAD, "w1", callback, True)]
    scene.call("w1", "w8", "g", 2)
    assert of_thread(scene, own, "w1") == [("future", CALL, "w1", scene["w1"]["calls_out"][1]["number"], True)]


def test_a_shutdown_waits_for_the_named_workers_or_those_that_have_not_called_it() -> None:
    scene = Scene("w0", "w1", "w2")
    main = scene.thread("w0", "train.py:9 main: rpc.shutdown()", wait=wait("shutdown", "w0", "w2"))
    scene["w0"]["phase"] = LEAVING
    assert of_thread(scene, main) == [("shutdown", WORKER, "w2", 0, False)]
    scene["w0"]["threads"][0]["wait"] = wait("shutdown")
    assert of_thread(scene, main) == [("shutdown", WORKER, name, 0, False) for name in ("w1", "w2")]
    scene["w0"]["missing"] = ["w1"]
    assert of_thread(scene, main) == [("shutdown", WORKER, "w1", 0, False)]


def test_meetings_are_left_to_the_rule_of_meetings(scene: Scene) -> None:
    main = scene.thread("w0", "train.py:9 main: everybody.barrier()", wait=wait("barrier", "w1"))
    scene.call("w0", "w1", "the barrier", 4, by=main)
    assert of_thread(scene, main) == []


# Ages, and what has waited for long


@pytest.mark.parametrize(
    ("waits", "phase_age", "age"),
    [
        (wait("value", age=7), 9.0, 7.0),
        (wait("shutdown"), 9.0, 9.0),
        (wait("init_rpc"), 9.0, 9.0),
        (wait("store"), 9.0, 9.0),
        (wait("backward"), 9.0, 6.0),
        (wait("room", "w1"), 9.0, 5.0),
        (wait("save"), 9.0, 3.0),  # that of the call which the thread runs
        (None, 9.0, 3.0),
    ],
)
def test_the_age_of_a_wait(scene: Scene, waits: Any, phase_age: float, age: float) -> None:
    number = scene.call("w1", "w0", "f", 3, runs="train.py:3 f: g()", wait=waits)
    scene.call("w0", "w1", "g", 5)
    scene.call("w0", "w8", "g", 8)
    scene["w0"]["phase_age"] = phase_age
    scene["w0"]["passes"] += [{"context": 7, "number": n, "age": a, "owing": []} for n, a in ((1, 6.0), (2, 4.0))]
    assert number is not None
    graph = WaitGraph(scene.sight, LONG)
    assert graph.age(Node(THREAD, "w0", number)) == age
    assert graph.age(Node(PASS, "w0", 2, context=7)) == 6.0
    assert graph.age(Node(CALL, "w0", 99, "w1")) == graph.age(Node(SLOTS, "w1")) == graph.age(Node(WORKER, "w1")) == 0


def test_ages_without_passes_calls_and_served_calls_are_unknown(scene: Scene) -> None:
    for waits in (wait("backward"), wait("room", "w1"), wait("save"), None):
        scene.thread("w0", "train.py:9 main: g()", wait=waits)
    graph = WaitGraph(scene.sight, LONG)
    assert [graph.age(node) for node in graph.threads] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("waits", "long"),
    [
        (wait("value", age=2), True),
        (wait("value", age=1.9), False),
        (wait("value"), True),  # of unknown age
        *((wait(what), False) for what in ("backward", "room", "init_rpc", "store", "serve")),
        (wait("init_rpc", age=9), False),
        (wait("shutdown"), True),  # for as long as the worker's phase
    ],
)
def test_which_waits_are_long(scene: Scene, waits: Any, long: bool) -> None:
    number = scene.thread("w0", "train.py:9 main: g()", wait=waits)
    assert starts(scene) == [(THREAD, number)] * long


def test_a_thread_has_waited_for_long_if_its_futures_or_its_lock_have(scene: Scene) -> None:
    waits = scene.thread("w0", "train.py:9 main: future.wait()")
    scene.call("w0", "w1", "f", 1.5)
    assert starts(scene) == []
    scene["w0"]["calls_out"][0]["age"] = 2.0
    assert starts(scene) == [(CALL, 2), (THREAD, waits)]
    scene = pair()
    number = scene.call("w0", "w1", "f", 1.5, runs="train.py:3 f: with lock:")
    assert starts(scene) == []
    scene["w1"]["calls_in"][0]["age"] = 2.0
    assert starts(scene) == [(THREAD, number)]


def test_a_pass_that_no_thread_waits_for_is_a_start(scene: Scene) -> None:
    scene["w0"]["passes"].append({"context": 7, "number": 5, "age": 2.0, "owing": ["w1"]})
    assert starts(scene) == [(PASS, 5)]
    scene["w0"]["passes"][0]["age"] = 1.9
    assert starts(scene) == []


# Locks


@pytest.mark.parametrize(
    ("place", "more", "lock"),
    [
        ("train.py:3 f: with self.lock:", {}, "self.lock"),
        ("train.py:3 f: with lock as held:", {}, "lock"),
        ("train.py:3 f: locks['a'].acquire()", {}, "locks['a']"),
        ("train.py:3 f: with lock:", {"inside": IN_THREADING}, "lock"),
        ("train.py:3 f: with lock:", {"inside": ["/lib/other.py:3 g"]}, None),
        ("train.py:3 f: with lock:", {"asleep": False}, None),
        ("train.py:3 f: with lock:", {"wait": wait("value")}, None),
        ("train.py:3 f: log.info(1)", {"inside": ["/usr/lib/logging/__init__.py:900 acquire"]}, "logging's"),
        (
            "train.py:3 f: import b",
            {"inside": ["<frozen importlib._bootstrap>:200 acquire"]},
            "Python's, for an import",
        ),
    ],
)
def test_the_lock_that_a_thread_takes(scene: Scene, place: str, more: dict[str, Any], lock: str | None) -> None:
    scene.thread("w0", place, **more)
    assert lock_of(scene["w0"]["threads"][0]) == lock


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"holds": ["lock"]}, True),
        ({"holds": ["other"]}, False),
        ({"outside": ["/home/ann/project/train.py:40 h"]}, True),  # in the file of the thread that waits
    ],
)
def test_a_lock_is_held_by_the_thread_that_says_so_or_by_one_of_the_same_file(
    scene: Scene, more: dict[str, Any], found: bool
) -> None:
    takes = scene.thread("w0", "train.py:3 f: with lock:")
    number = scene.thread("w0", "lib.py:20 g: x += 1", name="holder", **more)
    scene.thread("w0", "other.py:3 f: y += 1")
    assert of_thread(scene, takes) == [("lock", THREAD, "w0", number, True)] * found
