"""Tests of the scheduler: how many calls run at once, whose turn it is, and calls that find no slot."""

import random
from collections import Counter, deque

from telegrad._core.reactor.scheduler import MOST_LENT, STALLED_AFTER, Scheduler, Work, WorkQueue
from tests.seeds import run_each


def add(scheduler: Scheduler, queue: WorkQueue | None, *names: object, size: int = 0) -> WorkQueue | None:
    scheduler.add(deque((Work(lambda _: None, name, size=size), queue) for name in names))
    return queue


def begin(scheduler: Scheduler) -> object:
    """Return the argument of the work that begins; None if there is none."""
    work, _ = scheduler.next(scheduler.ready)
    return None if work is None else work.argument


def end(scheduler: Scheduler, queue: WorkQueue) -> None:
    scheduler.end(queue)
    scheduler.retry()


def full(count: int, queue: WorkQueue) -> Scheduler:
    scheduler = Scheduler(count)
    add(scheduler, queue, *range(count))
    assert [begin(scheduler) for _ in range(count)] == list(range(count))
    return scheduler


def test_works_without_a_slot_wait_and_begin_in_order() -> None:
    queue = WorkQueue()
    scheduler = full(2, queue)
    add(scheduler, queue, "a", "b")
    assert begin(scheduler) is None
    end(scheduler, queue)
    assert (begin(scheduler), begin(scheduler)) == ("a", None)
    end(scheduler, queue)
    end(scheduler, queue)
    assert (begin(scheduler), begin(scheduler), scheduler.busy) == ("b", None, 1)


def test_a_slot_is_lent_if_all_running_works_only_sleep() -> None:
    queue = WorkQueue()
    scheduler = full(1, queue)
    add(scheduler, queue, "a", "b", "c")
    assert begin(scheduler) is None
    assert not scheduler.lend(1.0, 0.5)
    assert not scheduler.lend(1.0 + STALLED_AFTER, 0.5)
    assert scheduler.lend(1.1 + STALLED_AFTER, 0.5)
    assert [begin(scheduler), begin(scheduler)] == ["a", None]
    end(scheduler, queue)
    end(scheduler, queue)
    assert [begin(scheduler), begin(scheduler)] == ["b", None]


def test_no_slot_is_lent_while_calls_work_or_end_or_times_are_unknown() -> None:
    queue = WorkQueue()
    scheduler = full(2, queue)
    assert not scheduler.lend(1.0, 0.0)
    assert not scheduler.lend(2.0, 0.9)  # the calls have used the processor
    scheduler.end(queue)
    assert not scheduler.lend(3.0, 0.9)  # a call has ended
    assert not scheduler.lend(4.0, None)


def test_the_number_of_lent_slots_is_limited() -> None:
    scheduler = full(1, WorkQueue())
    assert sum(scheduler.lend(number, 0.0) for number in range(MOST_LENT + 10)) == MOST_LENT


# Several callers


def test_callers_are_served_in_turn() -> None:
    scheduler, greedy, modest = Scheduler(9), WorkQueue(), WorkQueue()
    add(scheduler, greedy, *"abc")
    add(scheduler, modest, *"xy")
    add(scheduler, None, "-")
    assert "".join(str(begin(scheduler)) for _ in range(6)) == "ax-byc"


def test_a_caller_that_does_not_read_gets_no_slot_until_it_does() -> None:
    queue, other = WorkQueue(), WorkQueue()
    scheduler = Scheduler(1)
    scheduler.hold_up(queue, True)
    add(scheduler, queue, "a")
    add(scheduler, other, "x")
    assert begin(scheduler) == "x"
    assert not scheduler.waiting
    end(scheduler, other)
    assert begin(scheduler) is None
    scheduler.hold_up(queue, False)
    assert begin(scheduler) == "a"


def test_works_without_slots_begin_in_any_case() -> None:
    scheduler = full(1, WorkQueue())
    add(scheduler, WorkQueue(has_slots=False), "a")
    add(scheduler, None, "b")
    assert ([begin(scheduler), begin(scheduler)], scheduler.busy) == (["a", "b"], 1)


def test_a_queue_knows_the_bytes_that_wait() -> None:
    scheduler, queue = Scheduler(9), WorkQueue()
    works = [Work(lambda _: None, number, size=1 << number) for number in range(5)]
    scheduler.add(deque((each, queue) for each in works))
    begin(scheduler)
    assert queue.size == 2 + 4 + 8 + 16
    assert scheduler.drop(queue, {works[0], works[2], works[3]}) == [works[2], works[3]]
    assert queue.size == 2 + 16
    assert [each.argument for each in queue.works] == [1, 4]


def test_a_cleared_scheduler_returns_works_that_need_no_slot() -> None:
    scheduler = Scheduler(9)
    add(scheduler, None, "a")
    add(scheduler, WorkQueue(), "b")
    assert ([work.argument for work in scheduler.clear()], begin(scheduler)) == (["a"], None)


CALLERS = 4
ARRIVE, END, TAKE_NEXT, PAUSE, RESUME, HOLD, RELEASE, DROP, LEND = range(9)


class World:
    """A scheduler and the running works, as the reactor keeps them."""

    def __init__(self, count: int) -> None:
        self.count, self.lent = count, 0
        self.scheduler = Scheduler(count)
        self.queues = [WorkQueue() for _ in range(CALLERS)]
        self.running: Counter[WorkQueue] = Counter()
        self.paused: Counter[WorkQueue] = Counter()

    def happens(self, event: int, queue: WorkQueue) -> None:
        scheduler = self.scheduler
        if event == ARRIVE:
            add(scheduler, queue, 0)
        elif event in (END, TAKE_NEXT) and self.running[queue]:
            self.running[queue] -= 1
            self.lent -= self.lent > 0
            scheduler.end(queue)
            if event == END:
                scheduler.retry()
            elif (following := scheduler.next(scheduler.waiting)[1]) is not None:
                self.running[following] += 1
        elif event == PAUSE and self.running[queue]:
            self.running[queue] -= 1
            self.paused[queue] += 1
            scheduler.end(queue, is_over=False)
            scheduler.retry()
        elif event == RESUME and self.paused[queue]:
            self.paused[queue] -= 1
            self.running[queue] += 1
            scheduler.resume(queue)
        elif event in (HOLD, RELEASE):
            scheduler.hold_up(queue, event == HOLD)
        elif event == DROP:
            scheduler.drop(queue, set(queue.works))
        elif event == LEND and scheduler.waiting:
            scheduler._progress = 0.0, scheduler._ended, 0.0
            self.lent += scheduler.lend(STALLED_AFTER * 2, 0.0)
        while (queue_of := scheduler.next(scheduler.ready)[1]) is not None:
            self.running[queue_of] += 1
            is_first_beside_many = self.running[queue_of] == 1 and max(self.running.values()) > 1
            assert scheduler.busy <= scheduler.count or is_first_beside_many

    def check(self) -> None:
        """Check that no slot is lost, none is idle while a queue waits for it, and no caller takes all."""
        scheduler = self.scheduler
        assert (scheduler.busy, scheduler.count) == (self.running.total(), self.count + self.lent)
        assert all(each.held == self.running[each] for each in self.queues)
        waiting = [each for each in self.queues if len(each) and not each.is_held_up]
        assert set(waiting) == set(scheduler.waiting)
        assert not waiting or scheduler.busy >= scheduler.count
        if max(self.running.values(), default=0) > 1:
            assert all(each.held for each in waiting)


def live_at_random(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.randint(1, 4))
    for _ in range(150):
        world.happens(chance.randint(0, LEND), chance.choice(world.queues))
        world.check()


def test_slots_are_shared_fairly_in_any_order_of_events() -> None:
    run_each(range(200), live_at_random)
