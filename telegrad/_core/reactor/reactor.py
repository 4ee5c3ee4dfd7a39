"""Reads connections and runs works, on threads of which one leads.

The leader waits for the connections, reads frames, and runs the works that they bring. Handing work to another thread
costs more than most functions take, so the leader runs by itself what is expected to be short. It hands over the lead

    before    work that is known to be long, or not known yet;
    at        any wait of this package (`waiting()`), however deep in the work;
    after     a few milliseconds at the latest: the timer thread takes it from a leader that is stuck in its work.

So no connection waits for user code, whatever that does, and short calls cross no thread. At most `slots` calls run at
once. A call that waits does not count, so nested calls cannot use up the threads.

The leader takes one work of each caller in turn (`scheduler`), and looks at all connections after every TURN seconds,
so that a caller that sends without end delays the others by no more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from time import perf_counter

from telegrad._core.host.open_files import report_closed
from telegrad._core.locks import guarded, new_lock
from telegrad._core.reactor.leader_threads import LeaderThreads, Runner
from telegrad._core.reactor.scheduler import Scheduler, Work, WorkQueue
from telegrad._core.reactor.spinning import SOON, Spin
from telegrad._core.reactor.timer import TimerThread
from telegrad._core.transport.poller import READ, WRITE, Poller, Source

STUCK_AFTER = 4e-3  # a leader this long in its work loses the lead
TURN = 5e-4  # seconds until the leader looks at all connections again; so long do 64 quick calls take
NO_MEMORY_PAUSE = 0.01  # seconds until a thread goes on that found no memory

log = logging.getLogger("telegrad")


class Reactor:
    """The works of one worker, its connections, and the threads for both."""

    def __init__(self, slots: int, most_waiting: int, entered: Callable[[], None], timer: TimerThread) -> None:
        """`entered` is called first on each new thread; `timer` calls `watch`."""
        self._most_waiting = most_waiting
        self._timer = timer
        self._lock = new_lock()
        self._scheduler: Scheduler = guarded(
            Scheduler(slots), self._lock, ("ready", "waiting", "held_up", "busy", "count")
        )
        self._submitted: deque[tuple[Work, WorkQueue | None]] = deque()  # not yet added to the scheduler
        self.calls = WorkQueue()  # for works that need a slot and have no caller
        self._polling = Polling(self._scheduler, self._submitted)
        self.poller = self._polling.poller
        self._threads = LeaderThreads(self._lock, entered, self._lead, self.poller.close)
        self.on_worker = self._threads.is_member
        self._unsent: set[Source] = set()  # sources with answers that wait for the batch to end

    def __repr__(self) -> str:
        state = "closed" if self._threads.closed else f"{len(self._threads)} threads"
        return f"<Reactor: {state}, {len(self._scheduler.ready)} to look at; {self._scheduler!r}>"

    def start(self) -> None:
        self._threads.start()

    def close(self) -> None:
        """End the threads. Works that need a slot and have not begun are dropped, those that run are left to end."""
        self._threads.close(self.poller.wake)
        self._run_remaining()

    def submit(self, work: Work, queue: WorkQueue | None = None) -> None:
        """Have `work` run soon, from any thread: in the turn of `queue`, or in a turn of its own without a slot.

        Without a queue it must be short. It runs even if this is closed, since other threads may wait for its end.
        A finaliser may call this on a thread that holds the lock, so this does not wait for it: where the lock is
        taken, the leader adds the work before it looks for the next one.
        """
        self._submitted.append((work, queue))
        if self._lock.acquire(blocking=False):
            try:
                self._add_submitted()
            finally:
                self._lock.release()
        if self._polling.asleep:  # looked at after the work was appended: `Polling.poll` does it the other way round
            self.poller.wake()
        if self._threads.closed:  # likewise
            self._run_remaining()

    def _add_submitted(self) -> None:
        """Add to the scheduler what was submitted; the lock is held."""
        while self._submitted:
            self._scheduler.add(*self._submitted.popleft())

    def hold_up(self, queue: WorkQueue, is_held_up: bool) -> None:
        """Let no further work of a queue begin, or let them begin again."""
        with self._lock:
            self._scheduler.hold_up(queue, is_held_up)
        if not is_held_up:
            self.poller.wake()

    def drop(self, queue: WorkQueue, is_unwanted: Callable[[Work], bool]) -> list[Work]:
        """Remove works from a queue; return those that were removed."""
        with self._lock:
            self._add_submitted()
        unwanted = {id(work) for work in queue.works.copy() if is_unwanted(work)}
        with self._lock:
            return self._scheduler.drop(queue, unwanted)

    def batches(self) -> bool:
        """Return True if what this thread sends may wait for the end of a batch of works: only the leader has those."""
        return bool(self._scheduler.ready) and self._threads.leader is self._threads.here() is not None

    def sent_later(self, source: Source) -> None:
        """After something was left in the outbox of `source`: have the leader send it, or the next tick."""
        self._unsent.add(source)
        runner = self._threads.here()
        if runner is not None and self._threads.leader is not runner:  # the lead was taken from this thread meanwhile
            self.send_unsent()

    def send_unsent(self) -> None:
        """Send what was left for later."""
        while self._unsent:
            try:
                source = self._unsent.pop()
            except KeyError:  # emptied by two threads at once
                return
            source.on_writable()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around every wait: a thread of the reactor gives up the lead and its slot meanwhile."""
        runner = self._threads.here()
        if runner is None:
            yield
            return
        queue = runner.counted
        runner.waited = runner.waited or perf_counter()
        with self._lock:
            if queue is not None:
                self._scheduler.end(queue, is_over=False)
                self._scheduler.retry()
                runner.counted = None
        if self._threads.leader is runner:
            self.send_unsent()
            self._threads.hand_over(runner)
        elif self._scheduler.ready and self._polling.asleep:
            self.poller.wake()
        try:
            yield
        finally:
            if queue is not None:
                with self._lock:
                    self._scheduler.resume(queue)
                runner.counted = queue

    def worked_until(self) -> float:
        """Return when the work of this thread first waited, or now."""
        runner = getattr(self._threads.local, "runner", None)
        return runner.waited if runner is not None and runner.waited else perf_counter()

    @property
    def is_behind(self) -> bool:
        """Return True if more waits for a thread than should."""
        return len(self._scheduler.ready) >= self._most_waiting

    @property
    def idle(self) -> bool:
        """Return True if no call runs or waits for its turn."""
        scheduler = self._scheduler
        return not (self._submitted or scheduler.busy or scheduler.ready or scheduler.waiting or scheduler.held_up)

    def stands_for(self, now: float) -> float:
        """Return for how many seconds no thread has looked at the connections, though some should have."""
        return 0.0 if self._polling.asleep else now - self._polling.looked

    def watch(self, now: float) -> float:
        """Take the lead from a leader that is stuck in its work, and lend slots where calls wait for those that sleep.

        Return a time that is another one where anything has happened since the last call.
        """
        leader = self._threads.leader
        if leader is not None and leader.since and now - leader.since > STUCK_AFTER:
            self._threads.hand_over(leader, leader.since)
        if not self._scheduler.waiting:
            return self._polling.looked
        with self._lock:
            is_lent = self._scheduler.lend(now, self._threads.processor_time())
        if is_lent:
            self.poller.wake()
        return now

    # The loop of the leader

    def _lead(self, runner: Runner) -> None:
        try:
            self._run(runner)
        except MemoryError:  # even to log an error. The lead must go on; the work that had begun is lost
            time.sleep(NO_MEMORY_PAUSE)
            with self._lock:
                runner.since = 0.0
                if runner.counted is not None:
                    self._scheduler.end(runner.counted)
                    self._scheduler.retry()
                    runner.counted = None

    def _run(self, runner: Runner) -> None:
        """Look at the connections and run works in turn, for as long as this thread leads."""
        threads = self._threads
        while threads.leader is runner and not threads.closed:
            if self._unsent:
                self.send_unsent()
            try:
                self._polling.poll()
            except OSError as error:
                threads.closed = threads.closed or report_closed(error)
            until = perf_counter() + TURN
            with self._lock:
                self._add_submitted()
                work, runner.counted = self._scheduler.next(self._scheduler.ready)
            while work is not None:
                work = self._run_one(runner, work, until)

    def _run_one(self, runner: Runner, work: Work, until: float) -> Work | None:
        """Run a work; return the next one, where there is one for this thread.

        A leader goes on with what is ready, if this work began before `until`. Where this thread leads no more, it
        gives its slot to a call that waits for one.
        """
        threads, scheduler = self._threads, self._scheduler
        if work.is_long and threads.leader is runner:
            self.send_unsent()
            threads.hand_over(runner)
        runner.since = runner.began = perf_counter()
        runner.waited = 0.0
        if not self._timer.is_watching:
            self._timer.wake()
        try:
            work.run(work.argument)
        except BaseException:
            log.exception("telegrad: work of the agent failed")
        work.argument = None  # the frame below has the work for as long as the next one runs
        with self._lock:
            runner.since = 0.0
            queue, runner.counted = runner.counted, None
            leads = threads.leader is runner
            if self._submitted:
                self._add_submitted()
            if queue is not None:
                scheduler.end(queue)
                if leads and scheduler.waiting:
                    scheduler.retry()
            queues = scheduler.ready if leads else scheduler.waiting
            if not queues or (runner.began > until if leads else queue is None):
                return None
            following, runner.counted = scheduler.next(queues)
        return following

    def _run_remaining(self) -> None:
        """Once this is closed: run by this thread what other threads may wait for, and drop the rest."""
        with self._lock:
            self._add_submitted()
            works = self._scheduler.clear()
        for work in works:
            try:
                work.run(work.argument)
            except BaseException:
                log.exception("telegrad: work of the agent failed")


class Polling:
    """How the leader waits for connections: it looks for a short while, then sleeps."""

    def __init__(self, scheduler: Scheduler, submitted: Collection[object]) -> None:
        self.poller = Poller()
        self.asleep = False
        self.looked = 0.0  # when the leader last looked at all connections
        self._scheduler = scheduler
        self._submitted = submitted
        self._spins = False
        self._recent: Source | None = None  # the source that was ready last

    def poll(self) -> None:
        """Read the connections over which something has come; return without where there are works to run."""
        ready, start = self._scheduler.ready, perf_counter()
        events = self._spin(start) if self._spins and not ready else []
        if events is None:
            return
        if not events:
            self.asleep = True
            try:
                events = self.poller.poll(0 if ready or self._submitted else None)
            finally:
                self.asleep = False
        self.looked = perf_counter()
        is_soon = self.looked - start < SOON
        self._spins = False
        for source, mask in events:
            if mask & WRITE:
                source.on_writable()
            if mask & READ:
                _read(source)
                if source.prompt:
                    self._recent, self._spins = source, is_soon

    def _spin(self, start: float) -> list[tuple[Source, int]] | None:
        """Look again for a short while; return None where work has come meanwhile.

        Not while another thread of the process has something to do: it would wait for the interpreter again and again.
        """
        spin, recent = Spin(start, gives_way=True), self._recent
        while True:
            # Bounded by time: a caller that sends without end is read here again and again, and its calls are run.
            if recent is not None and start - self.looked < TURN and _read(recent):
                return None
            if self._scheduler.ready or self._submitted:
                return None
            self.looked = start
            events = self.poller.poll(0)
            if events or self._scheduler.busy or not spin.again():
                return events


def _read(source: Source) -> bool:
    """Read a source; one that fails must not end the leader."""
    try:
        return source.on_readable()
    except Exception:
        log.exception("telegrad: reading a connection failed")
        return False
