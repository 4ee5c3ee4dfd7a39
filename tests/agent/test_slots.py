"""How many calls run at once, whose turn it is, and what becomes of those that find no slot."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from telegrad.agent.slots import MOST_LENT, STALLED_AFTER, Slots
from telegrad.agent.works import LONG, Work, WorkQueue


def work(name: object, size: int = 0) -> Work:
    return Work(lambda _: None, name, LONG, size)


def queue_of(*names: object) -> WorkQueue:
    queue = WorkQueue()
    for name in names:
        queue.append(work(name))
    return queue


def begin(slots: Slots, queue: WorkQueue) -> object:
    """What of a queue begins; None if nothing does."""
    found, _ = slots.begin(queue)
    return None if found is None else found.argument


def following(slots: Slots) -> object:
    """What begins of those that wait; None if nothing does."""
    _, found, _ = slots.next()
    return None if found is None else found.argument


def full(count: int, queue: WorkQueue) -> Slots:
    slots = Slots(count)
    for _ in range(count):
        queue.append(work("running"))
        assert begin(slots, queue) == "running"
    return slots


def test_who_finds_no_slot_waits_and_comes_in_order() -> None:
    queue = WorkQueue()
    slots = full(2, queue)
    for name in "ab":
        queue.append(work(name))
        assert begin(slots, queue) is None
    assert following(slots) is None
    slots.end(queue)
    assert following(slots) == "a"
    assert following(slots) is None
    slots.end(queue)
    slots.end(queue)
    assert following(slots) == "b"
    assert following(slots) is None
    assert slots.busy == 1


def test_a_call_that_waits_gives_its_slot_to_another() -> None:
    queue = WorkQueue()
    slots = full(1, queue)
    queue.append(work("a"))
    assert begin(slots, queue) is None
    assert slots.free() == []
    slots.pause(queue)
    assert slots.free() == [queue]
    assert begin(slots, queue) == "a"
    slots.resume(queue)  # there are two for a while
    assert slots.busy == 2
    queue.append(work("b"))
    assert begin(slots, queue) is None
    slots.end(queue)
    assert slots.free() == []
    slots.end(queue)
    assert slots.free() == [queue]


def test_where_all_that_run_only_sleep_one_more_is_let_in_until_a_call_ends() -> None:
    queue = WorkQueue()
    slots = full(1, queue)
    queue.append(work("a"))
    begin(slots, queue)
    assert not slots.lend(1.0, 0.5)
    assert not slots.lend(1.0 + STALLED_AFTER, 0.5)
    assert slots.lend(1.1 + STALLED_AFTER, 0.5)
    assert following(slots) == "a"
    slots.end(queue)
    slots.end(queue)
    queue.append(work("b"))
    queue.append(work("c"))
    assert begin(slots, queue) == "b"
    assert begin(slots, queue) is None


def test_no_slot_is_lent_while_calls_work_or_end_or_where_nobody_knows() -> None:
    queue = WorkQueue()
    slots = full(2, queue)
    assert not slots.lend(1.0, 0.0)
    assert not slots.lend(2.0, 0.9)  # they have used the processor
    slots.end(queue)
    assert not slots.lend(3.0, 0.9)  # one has ended
    assert not slots.lend(4.0, None)


def test_the_slots_that_are_lent_have_a_bound() -> None:
    slots = full(1, WorkQueue())
    lent = [slots.lend(number, 0.0) for number in range(MOST_LENT + 10)]
    assert sum(lent) == MOST_LENT


def test_its_state_can_be_seen() -> None:
    queue = WorkQueue()
    slots = full(1, queue)
    queue.append(work("a"))
    begin(slots, queue)
    assert repr(slots) == "<Slots: 1 of 1 busy, 1 wait>"


# Several callers


def test_a_caller_that_holds_none_gets_a_slot_where_another_holds_several() -> None:
    greedy, modest = WorkQueue(), queue_of("a", "b")
    slots = full(3, greedy)
    assert begin(slots, modest) == "a"
    assert begin(slots, modest) is None  # it holds one now
    assert slots.busy == 4
    slots.end(greedy)
    assert following(slots) is None  # one was beyond the count
    slots.end(greedy)
    assert following(slots) == "b"


def test_one_slot_stays_one() -> None:
    slots = full(1, WorkQueue())
    assert begin(slots, queue_of("a")) is None


def test_a_free_slot_goes_to_the_caller_that_holds_the_fewest() -> None:
    first, second = queue_of(*"abcd"), queue_of(*"xyz")
    slots = Slots(3)
    for _ in range(3):
        begin(slots, first)
    assert begin(slots, first) is None  # it waits first
    assert begin(slots, second) == "x"
    assert begin(slots, second) is None
    slots.pause(first)
    slots.pause(first)
    assert following(slots) == "d"
    slots.resume(first)
    slots.end(first)
    slots.end(first)
    slots.end(first)
    assert following(slots) == "y"


def test_a_caller_that_does_not_read_gets_no_slot_until_it_does() -> None:
    queue, other = queue_of("a"), queue_of("x")
    slots = Slots(1)
    queue.is_held_up = True
    assert begin(slots, queue) is None
    assert not slots.has_waiting
    assert begin(slots, other) == "x"
    slots.end(other)
    assert following(slots) is None
    queue.is_held_up = False
    assert slots.has_waiting
    assert following(slots) == "a"


def test_works_without_slots_begin_in_any_case() -> None:
    slots = full(1, WorkQueue())
    queue = WorkQueue(has_slots=False)
    queue.append(work("a"))
    assert begin(slots, queue) == "a"
    assert slots.busy == 1


def test_a_queue_is_listed_once_for_all_that_is_in_it() -> None:
    queue = WorkQueue()
    assert queue.append(work("a"))
    assert not queue.append(work("b"))
    assert queue.pop()[1]
    assert not queue.pop()[1]
    assert queue.append(work("c"))


def test_a_queue_knows_the_bytes_that_wait() -> None:
    queue = WorkQueue()
    works = [work(number, 1 << number) for number in range(5)]
    for each in works:
        queue.append(each)
    queue.pop()
    assert queue.size == 2 + 4 + 8 + 16
    assert queue.drop({id(works[0]), id(works[2]), id(works[3])}) == [id(works[2]), id(works[3])]
    assert queue.size == 2 + 16
    assert [each.argument for each in queue.works] == [1, 4]


CALLERS = 4
ARRIVE, END, PAUSE, RESUME, HOLD, RELEASE, LEND = range(7)


class World:
    """Slots, and the works that run, as the reactor keeps them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lent = 0
        self.slots = Slots(count)
        self.queues = [WorkQueue() for _ in range(CALLERS)]
        self.running, self.paused = [0] * CALLERS, [0] * CALLERS
        self._ready: list[WorkQueue] = []

    def happens(self, event: int, who: int) -> None:
        queue = self.queues[who]
        if event == ARRIVE and queue.append(work(who)):
            self._ready.append(queue)
        elif event == END and self.running[who]:
            self._ends(who)
        elif event == PAUSE and self.running[who]:
            self.running[who], self.paused[who] = self.running[who] - 1, self.paused[who] + 1
            self.slots.pause(queue)
            self._ready += self.slots.free()
        elif event == RESUME and self.paused[who]:
            self.running[who], self.paused[who] = self.running[who] + 1, self.paused[who] - 1
            self.slots.resume(queue)
        elif event in (HOLD, RELEASE):
            queue.is_held_up = event == HOLD
            self._ready += self.slots.free()
        elif event == LEND and self.slots.has_waiting:
            self.slots._seen = 0.0, self.slots._ended, 0.0
            self.lent += self.slots.lend(STALLED_AFTER * 2, 0.0)
            self._ready += self.slots.free()
        self._run_ready()

    def _ends(self, who: int) -> None:
        self.running[who] -= 1
        self.slots.end(self.queues[who])
        self.lent -= self.lent > 0
        owner, _, has_more = self.slots.next()
        if owner is not None:
            self.running[self.queues.index(owner)] += 1
            self._ready += [owner] * has_more

    def _run_ready(self) -> None:
        while self._ready:
            queue = self._ready.pop(0)
            found, has_more = self.slots.begin(queue)
            self.running[self.queues.index(queue)] += found is not None
            self._ready += [queue] * has_more

    def check(self) -> None:
        """No slot is lost, and none is idle while a queue waits for it."""
        assert self.slots.busy == sum(self.running)
        assert self.slots.count == self.count + self.lent
        assert [each.held for each in self.queues] == self.running
        assert not self.waiting or self.slots.busy >= self.slots.count

    @property
    def waiting(self) -> list[WorkQueue]:
        return [each for each in self.queues if len(each) and not each.is_held_up]


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, LEND), st.integers(0, CALLERS - 1)), max_size=200))
def test_any_events(count: int, events: Sequence[tuple[int, int]]) -> None:
    world = World(count)
    for event, who in events:
        world.happens(event, who)
        world.check()
        if max(world.running) > 1 and event not in (END, RESUME):  # after these, a caller waits for the next event
            assert all(each.held for each in world.waiting)
