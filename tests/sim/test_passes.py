"""Tests of the backward pass as state machines: 50 workers, random graphs, messages in any order."""

import random
from collections import Counter
from collections.abc import Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad._core.membership.members import Identity
from telegrad.autograd import passes
from telegrad.autograd.pass_parts import LocalPart
from telegrad.autograd.passes import (
    ENDED,
    NOWHERE,
    WITHOUT,
    DeclareDead,
    Driver,
    Mark,
    PackedShipment,
    PassReport,
    PassSpec,
    Start,
)
from telegrad.autograd.schedule import LEAF, PLAIN, RECV, EngineCall, GraphSchedule
from telegrad.autograd.send_recv import Outbox
from telegrad.errors import UnusedSends
from tests.autograd.orders import reachable
from tests.seeds import ONLY, by_day_and_night, run_each

ONE = torch.ones(1)


ages = count()


class Node:
    """A node in the graph of one worker."""

    def __init__(self, worker: int, *following: "Node") -> None:
        self.worker = worker
        self.next_functions = [(each, 0) for each in following]
        self.runs = 0
        self.age = next(ages)

    def _sequence_nr(self) -> int:
        return self.age


class Leaf(Node):
    pass


class HookedLeaf(Leaf):
    pass


class RecvNode(Node):
    """A node that receives message `number` of `sender`."""

    def __init__(self, worker: int, sender: int, number: int) -> None:
        super().__init__(worker)
        self.sender = sender
        self.number = number


KINDS = {Leaf: lambda _: PLAIN, HookedLeaf: lambda _: LEAF, RecvNode: lambda _: RECV}


class FakeAgent:
    """An agent that puts the messages of an outbox into the mail."""

    streams = SimpleNamespace(used=(), publish=lambda: None)

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name

    def notify(self, to: str, message: Any, _: str, tensors: Any, context: None) -> None:
        self.world.post(self.name, to, message._replace(spec=self.world.driver.spec, tensors=tensors))


class FakeRunner:
    """A graph whose gradients are the sets of nodes that they came through: a run must see all of its own at once."""

    def __init__(self, world: "World", me: int) -> None:
        self.world, self.me = world, me
        self.roots = world.roots if me == 0 else []
        self.pending: set[Node] = set()
        self.marked: set[int] = set()
        self.buried = False
        entries = {number: [node] for number, node in world.sends[me].items()}
        if self.roots:
            entries[0] = self.roots
        self.schedule = GraphSchedule(entries, KINDS)

    def node_of(self, entry: int) -> list[Node]:
        return [self.world.sends[self.me][entry]] if entry else self.roots

    def start(self) -> None:
        self.arrive([(0, [ONE])])

    def arrive(self, gradients: Any) -> None:
        assert str(self.me) not in self.world.stepped, "a gradient came after the step_id's turn"
        for entry, came in gradients:
            if came[0] is not None:
                self.pending.update(node for node in self.node_of(entry) if type(node) is not Leaf)
            self.schedule.close(entry)
        self.run()

    def mark(self, sends: Any) -> Any:
        starts = [node for send in sends for node in self.node_of(send)] if sends else list(self.pending)
        self.marked.update(sends)
        found: dict[str, list[int]] = {}
        for node in self.schedule.mark(starts):
            found.setdefault(str(node.sender), []).append(node.number)
        return found

    def bury(self) -> None:
        self.buried = True
        for entry in [entry for entry in self.schedule.open if entry not in self.marked]:
            self.schedule.close(entry)
        self.run()

    @property
    def expects(self) -> bool:
        return bool(self.schedule.open)

    def run(self) -> None:
        ordered = self.world.draw.random() < 0.2
        step = self.schedule.step(self.pending, ordered)
        if step is None:
            return
        calls = [act for act in step.acts if isinstance(act, EngineCall)]
        hand = [act for act in step.acts if not isinstance(act, EngineCall)]
        ordered |= bool(hand or step.unreached or len(calls) > 1)
        for act in step.acts:
            if isinstance(act, EngineCall):
                self.call(act, ordered)
            else:
                self.run_node(act)
        recvs = [node for call in calls for node in call.recvs] + [node for node in hand if type(node) is RecvNode]
        for node in [*recvs, *step.unreached]:
            if not node.runs and (not self.buried or node in self.schedule.marked):
                self.world.ship(self.me, node, False)

    def call(self, call: EngineCall, ordered: bool) -> None:
        """Run the nodes behind those where gradients enter, as the engine would, up to those that it must return."""
        behind = reachable(call.fed, following) - set(call.fed)
        assert not behind.intersection([*call.leaves, *call.recvs, *call.fed]), "the engine would run what waits"
        seen: set[Node] = set(call.fed)
        found: list[Node] = []

        def visit(node: Node) -> None:
            if node in seen or type(node) is Leaf:
                return
            seen.add(node)
            for following, _ in node.next_functions:
                visit(following)
            found.append(node)

        for node in call.nodes:
            if node in self.pending:
                visit(node)
        assert not ordered or set(found) == set(call.nodes), "a call ran something else"
        for node in found[::-1]:
            self.run_node(node)

    def run_node(self, node: Node) -> None:
        assert str(self.me) not in self.world.stepped, "a node ran after the step_id's turn"
        self.pending.remove(node)
        node.runs += 1
        self.world.check(node)
        self.pending.update(following for following, _ in node.next_functions if type(following) is not Leaf)
        if type(node) is RecvNode:
            self.world.ship(self.me, node, True)

    @property
    def starved(self) -> bool:
        return bool(self.pending)

    @property
    def waiting(self) -> list[str]:
        return [str(entry) for entry in self.schedule.open]


def following(node: Node) -> list[Node]:
    return [each for each, _ in node.next_functions]


class World:
    """Random graphs on some workers, joined by messages; and one pass over them."""

    def __init__(self, seed: int, size: int, steps: int, fast: bool = False) -> None:
        self.draw = random.Random(seed)
        self.sends: list[dict[int, Node]] = [{} for _ in range(size)]
        self.sources: dict[RecvNode, Node] = {}
        self.nodes: list[list[Node]] = [
            [self.draw.choice([Leaf, HookedLeaf])(worker) for _ in range(3)] for worker in range(size)
        ]
        for _ in range(steps):
            self.grow()
        self.letters: Counter[str] = Counter()
        self.mail: list[tuple[str, str, Any]] = []
        self.stepped: set[str] = set()
        self.driver = Driver(PassSpec(1, "0", 1, False, False, fast, ("0",), step_id=1))
        self.roots = [Node(0, *self.draw.sample(self.nodes[0], min(8, len(self.nodes[0]))))]
        self.join(range(size))

    def join(self, workers: Iterable[int]) -> None:
        self.parts = {str(worker): self.part(worker) for worker in workers}

    def part(self, worker: int) -> LocalPart:
        agent: Any = FakeAgent(self, str(worker))
        unused: Any = None
        runner: Any = FakeRunner(self, worker)
        outbox = Outbox(agent, unused, self.driver.spec, self.draw.random() < 0.8, lambda _: None)
        return LocalPart(outbox, runner)

    def grow(self) -> None:
        worker = self.draw.randrange(len(self.nodes))
        here = self.nodes[worker]
        if self.draw.random() < 0.5:
            here.append(Node(worker, *self.draw.sample(here[-6:], self.draw.choice([1, 2, 3]))))
            return
        other = self.draw.randrange(len(self.nodes))
        number = len(self.sends[worker]) + 1
        self.sends[worker][number] = source = self.draw.choice(here[-6:])
        received = RecvNode(other, worker, number)
        self.sources[received] = source
        self.nodes[other].append(received)

    def reachable(self) -> set[Node]:
        def ahead(node: Node) -> list[Node]:
            return [*following(node), self.sources[node]] if type(node) is RecvNode else following(node)

        return reachable(self.roots, ahead)

    def check(self, node: Node) -> None:
        assert node.runs == 1, "a node ran twice"

    def ship(self, worker: int, node: RecvNode, given: bool) -> None:
        to = Identity(str(node.sender), node.sender, "")
        self.parts[str(worker)].outbox.add(to, node.number, [ONE if given else None], False, self.draw.random() < 0.5)

    def post(self, sender: str, to: str, message: Any) -> None:
        self.letters[type(message).__name__] += 1
        self.mail.append((sender, to, message))

    def run(self) -> None:
        for to, task in self.driver.start([("0", self.roots)]):
            self.post("0", to, task)
        while self.mail:
            _, to, message = self.mail.pop(self.draw.randrange(len(self.mail)))
            if isinstance(message, passes.PassReport):
                for worker, task in self.driver.report(message):
                    self.post("0", worker, task)
                continue
            tasks = [message]
            for other in [each for each in self.mail if each[1] == to and not isinstance(each[2], passes.PassReport)]:
                if self.draw.random() < 0.5:
                    self.mail.remove(other)
                    tasks.append(other[2])
            part = self.parts[to]
            shipments = [task for task in tasks if isinstance(task, PackedShipment) and task.reports]
            reports = [report for each in shipments for report in part.outbox.carry(each)]
            letters = part.take(tasks)
            if self.draw.random() < 0.2:
                reports += part.outbox.send_early()
            if part.may_step([part]):
                assert to not in self.stepped, "the step_id had a second turn"
                self.stepped.add(to)
                part.note_step((True, to))
            for worker, task in letters:
                self.post(to, worker, task)
            for report in [*reports, *part.outbox.finish(part.report)]:
                self.post(to, "0", report)


def run_seed(seed: int) -> World:
    draw = random.Random(seed)
    size = draw.choice([2, 3, 10, 50])
    world = World(seed, size, steps=size * draw.choice([5, 20, 40]))
    world.run()
    assert world.driver.state == ENDED, "the pass did not end"
    assert world.driver.marked <= 1
    assert world.driver.stepped == {worker: (True, worker) for worker in world.stepped}, (
        "the driver does not know who stepped"
    )
    reachable = world.reachable()
    unused = {str(received.sender) for received in world.sources if received not in reachable}
    could_know = world.driver.workers if world.driver.marked else world.driver.workers - unused
    assert could_know == world.stepped, "a step_id had no turn, or one too many"
    for nodes in world.nodes:
        for node in nodes:
            if type(node) is not Leaf:
                assert node.runs == (node in reachable), "a node did not run, or one that takes no part did"
    sends = sum(map(len, world.sends))
    assert world.letters["PackedShipment"] <= sends
    assert world.letters["Mark"] <= sends + size
    assert sum(world.letters.values()) <= 4 * sends + 6 * size + 2
    return world


@by_day_and_night(range(60), range(60, 10_060))
def test_a_pass_reaches_each_node_of_any_graph_once(seeds: range) -> None:
    assert sum(run_each(seeds, lambda seed: run_seed(seed).driver.marked)) or ONLY


def test_no_marks_are_sent_if_all_nodes_take_part() -> None:
    world = World(0, 1, 0)
    first, second = Leaf(0), Node(0)
    world.sends = [{}, {}]
    for hop in range(1, 9):
        here, there = hop % 2, 1 - hop % 2
        world.sends[there][hop] = second
        received = RecvNode(here, there, hop)
        world.sources[received] = second
        second = Node(here, received, first) if here == 0 else Node(here, received)
    world.roots = [second]
    world.join([0, 1])
    world.run()
    assert world.driver.state == ENDED
    assert not world.driver.marked
    assert world.letters == {"Start": 1, "PackedShipment": 8, "PassReport": 9}


def test_a_fast_pass_with_unused_parts_fails() -> None:
    world = next(world for world in (World(seed, 3, 60, fast=True) for seed in range(20)) if is_partly_used(world))
    with pytest.raises(UnusedSends) as missing:
        world.run()
    assert "arrived for\n  on worker " in str(missing.value)


def is_partly_used(world: World) -> bool:
    reachable = world.reachable()
    return not all(node in reachable for node in world.sources)


def test_a_rider_waits_for_other_passes_of_the_context() -> None:
    first, second = (ridden_world(number) for number in (1, 2))
    one, other = first.parts["0"], second.parts["0"]
    assert one._runner.expects
    other.take([start for _, start in second.driver.start([("0", second.roots)])])
    assert not other._runner.expects
    assert not other.may_step([one, other])
    one.take([start for _, start in first.driver.start([("0", first.roots)])])
    assert other.may_step([one, other])
    other.note_step((True, 1))
    assert not other.may_step([one, other])
    assert [other.report().stepped for _ in range(2)] == [(True, 1), None]


def test_nothing_rides_with_a_pass_without_a_rider() -> None:
    world = ridden_world(1)
    world.driver.spec = world.driver.spec._replace(step_id=0)
    world.join([0])
    part = world.parts["0"]
    part.take([start for _, start in world.driver.start([("0", world.roots)])])
    assert not part._runner.expects
    assert not part.may_step([part])


def ridden_world(seed: int) -> World:
    """Return a world of one worker that sends nothing."""
    return World(seed, 1, 0)


def test_a_driver_marks_from_where_gradients_wait_and_then_declares_the_other_sends_dead() -> None:
    spec = PassSpec(1, "a", 1, False, False, False, ("a", "b"))
    driver = Driver(spec)
    started = [("a", Start(spec, ("", 1), [1.0])), ("b", Start(spec, ("", 2), [2.0]))]
    assert (driver.start([("a", [1.0]), ("b", [2.0])]), driver.owing) == (started, ["a", "b"])
    assert driver.report(PassReport(spec, "a", 1, [("", 1)], [(("a", 1), "c")], False, ())) == []
    assert driver.owing == ["b", "c"]
    assert driver.report(PassReport(spec, "c", 1, [("a", 1)], [], True, ())) == []
    assert driver.report(PassReport(spec, "b", 1, [("", 2)], [], False, ())) == [("c", Mark(spec, ("", 3), ()))]
    assert (driver.marked, driver.owing) == (1, ["c"])
    dead = [(worker, DeclareDead(spec, ("", key))) for worker, key in (("a", 4), ("b", 5), ("c", 6))]
    assert driver.report(PassReport(spec, "c", 2, [("", 3)], [], True, ())) == dead
    for worker, key in (("a", 4), ("b", 5), ("c", 6)):
        assert driver.state != ENDED
        assert driver.report(PassReport(spec, worker, 3, [("", key)], [], False, ())) == []
    assert (driver.state, driver.owing, driver.marked) == (ENDED, [], 1)


def test_a_fast_pass_fails_if_sends_wait_although_no_gradient_does() -> None:
    driver = Driver(spec := PassSpec(1, "a", 1, False, False, True, ("a",)))
    driver.start([("a", [1.0])])
    with pytest.raises(UnusedSends) as missing:
        driver.report(PassReport(spec, "a", 1, [("", 1)], [], False, ("a send",)))
    assert "arrived for\n  on worker 'a': a send\nUse" in str(missing.value)


def test_a_shipment_has_the_gradients_of_some_of_its_tensors() -> None:
    spec = PassSpec(1, "a", 1, False, False, False, ("a",))
    shipment = PackedShipment(spec, ("", 1), [(5, [0, None, NOWHERE]), (6, [1])], (), ["first", "second"])
    assert shipment.unpacked() == [(5, ["first", None, WITHOUT]), (6, ["second"])]


def end(driver: Driver) -> list[Any]:
    driver.state = passes.ENDED
    return []


def forget(outbox: Outbox, worker: str) -> tuple[str, int]:
    key = key_of(outbox, worker)
    outbox.sent.pop()
    return key


mark, key_of = GraphSchedule.mark, Outbox.key
WRONG: dict[str, tuple[Any, str, Any]] = {
    "a driver that does not ask": (Driver, "_quiet", end),
    "step_ids that wait for nothing": (FakeRunner, "expects", property(lambda runner: False)),
    "step_ids that wait for what can still come": (FakeRunner, "expects", FakeRunner.starved),
    "marks that stop": (GraphSchedule, "mark", lambda schedule, starts: mark(schedule, starts)[:1]),
    "reports that forget": (Outbox, "key", forget),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[name])
    with pytest.raises(AssertionError, match="SEED=.*step_id" if name.startswith("step_ids") else "SEED="):
        run_each(range(50), run_seed)
