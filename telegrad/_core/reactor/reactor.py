"""Reads connections and runs works, on threads of which one leads.

The leader waits for the connections, reads frames, and runs the works that they bring. A switch to another thread costs
more than most functions take, so the leader itself runs works that are expected to be short. It passes the lead

    before    work that is known to be long, or not known yet;
    at        any wait of this package (`waiting()`), even deep inside the work;
    after     a few milliseconds: the timer thread takes the lead from a leader that is stuck in its work.

No connection therefore waits for user code, and short calls need no thread switch. At most `slots` calls run at once. A
waiting call does not count, so nested calls cannot exhaust the threads.

The leader takes one work of each caller in turn (`scheduler`), and polls all connections after every TURN seconds. A
caller that sends without end delays the others by no more.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Lock
from time import perf_counter
from typing import Any

from telegrad._core.calls.cancelling import serving
from telegrad._core.forks import in_child
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.reactor.leader_threads import LeaderThreads, ReactorThread, Spin, TimerThread
from telegrad._core.reactor.scheduler import Scheduler, Work, WorkQueue
from telegrad._core.threads import Here
from telegrad._core.transport.link import Link
from telegrad._core.transport.poller import READ, WRITE, Poller, Source

STUCK_AFTER = 4e-3  # seconds in one work after which a leader loses the lead
TURN = 5e-4  # seconds between two polls of all connections: about 64 quick calls
NO_MEMORY_PAUSE = 0.01  # seconds that a thread pauses after it ran out of memory, or could not log an error
# Seconds without messages after which the leader, or a thread that waits in `run_for`, sleeps. Between two messages of
# a training step, the other worker runs torch's engine and much Python: 200 us, or twice that on a slow machine. Longer
# would take the processor from other workers, if a host has more of them than processors.
MOMENT = 5e-4

log = logging.getLogger("telegrad")


class Reactor:
    """The works and connections of one worker, and the threads that handle them."""

    def __init__(self, slots: int, most_waiting: int, entered: Callable[[], None], timer: TimerThread) -> None:
        """`entered` is the first function called on each new thread; `timer` calls `watch`."""
        self._most_waiting = most_waiting
        self.timer = timer
        self._lock = Lock()
        self._scheduler = Scheduler(slots)
        self._submitted: deque[tuple[Work, WorkQueue | None]] = deque()  # not yet added to the scheduler
        self.calls = WorkQueue()  # for works that need a slot but have no caller
        self._polling = Polling(self._scheduler, self._submitted)
        self.poller = self._polling.poller
        self._threads = LeaderThreads(self._lock, entered, self._lead, self.poller.close)
        self.here = self._threads.here  # `own` is set on threads of this reactor
        self.unsent: set[Source] = set()  # sources with answers that are sent at the end of the batch

    def start(self) -> None:
        self._threads.start()

    def close(self) -> None:
        """End the threads. Drop works that need a slot and have not begun; let running works finish."""
        self._threads.close(self._polling.close)
        self._run_remaining()

    def submit(self, work: Work, queue: WorkQueue | None = None) -> None:
        """Run `work` soon, from any thread: in the turn of `queue`, or in its own turn without a slot.

        Without a queue the work must be short. It runs even if the reactor is closed, since other threads may wait for
        it. A finaliser may call this on a thread that holds the lock, so this does not wait for the lock. If the lock
        is taken, the leader adds the work before it looks for the next one.
        """
        self._submitted.append((work, queue))
        if self._lock.acquire(blocking=False):
            try:
                self._scheduler.add(self._submitted)
            finally:
                self._lock.release()
        # The leader sets `asleep` and then looks for submitted works; this thread appends its work and then reads
        # `asleep`. So in every interleaving the leader finds the work, or this thread wakes the leader. If the flag was
        # read before the append, the leader could look, find nothing and fall asleep between the two, and the work
        # would wait for the next frame.
        if self._polling.asleep:
            self.poller.wake()
        # The same order for the close, which sets `closed` and then runs the remaining works: one of the two threads
        # finds this work, and `Scheduler.clear` hands it to one of them only.
        if self._threads.closed:
            self._run_remaining()

    def hold_up(self, queue: WorkQueue, is_held_up: bool) -> None:
        """Block or unblock a queue: no work of a blocked queue begins."""
        with self._lock:
            self._scheduler.hold_up(queue, is_held_up)
        self._wake_if_ready()

    def drop(self, queue: WorkQueue, is_unwanted: Callable[[Work], bool]) -> list[Work]:
        """Remove the unwanted works from a queue and return them."""
        with self._lock:
            self._scheduler.add(self._submitted)
        # The search takes no lock: works may begin meanwhile, and `Scheduler.drop` removes those that are still in the
        # queue. The set keeps the works themselves: the address of a freed one could belong to a new work.
        unwanted = {work for work in queue.works.copy() if is_unwanted(work)}
        with self._lock:
            return self._scheduler.drop(queue, unwanted)

    def batches(self) -> bool:
        """Return True if messages of this thread may wait for the end of a batch of works, which only a leader has."""
        return bool(self._scheduler.ready) and self._threads.leader is self.here.own is not None

    def sent_later(self, source: Source) -> None:
        """Send the outbox of `source` soon, by the leader or by the next tick."""
        # Add first, then look at the lead. The timer may take the lead from this thread at any moment: if that happens
        # after the look, the next leader finds the source, since it looks at `unsent` before it polls.
        self.unsent.add(source)
        runner = self.here.own
        if runner is not None and self._threads.leader is not runner:  # this thread has lost the lead
            self.send_unsent()

    def send_unsent(self) -> None:
        while self.unsent:
            try:
                source = self.unsent.pop()
            except KeyError:  # two threads emptied the set at once
                return
            source.on_writable()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Release the lead and the slot of a reactor thread during a wait. Every wait must use this."""
        runner: ReactorThread | None = self.here.own
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
        # The next leader would also send these answers, but only after it has been woken.
        if self._threads.leader is runner:
            self.send_unsent()
            self._threads.hand_over(runner)
        else:
            self._wake_if_ready()
        try:
            yield
        finally:
            # The slot is taken back at once, also if that makes more than `count`. A thread that waited for a slot here
            # could deadlock: the call that holds the slot may wait for a lock of the program that this thread's
            # function holds. `resume` may make works of other queues ready (rule 3 of the scheduler), and a sleeping
            # leader must hear of them. Without the wake-up, a call to a worker with one thread could stand until its
            # timeout.
            if queue is not None:
                with self._lock:
                    self._scheduler.resume(queue)
                runner.counted = queue
                self._wake_if_ready()

    @property
    def is_behind(self) -> bool:
        return len(self._scheduler.ready) >= self._most_waiting

    @property
    def idle(self) -> bool:
        scheduler = self._scheduler
        return not (self._submitted or scheduler.busy or scheduler.ready or scheduler.waiting or scheduler.held_up)

    def stands_for(self, now: float) -> float:
        """Return for how many seconds no thread has polled the connections, although one should have."""
        return 0.0 if self._polling.asleep else now - self._polling.looked

    def watch(self, now: float) -> float:
        """Take the lead from a stuck leader, and add slots if calls wait for calls that sleep.

        Return a value that changes if anything has happened since the last call.
        """
        # Read without the lock. `hand_over` compares `since` again under the lock: the work may have ended meanwhile,
        # and a leader that sleeps in the poller must not be replaced, since then two threads would poll.
        leader = self._threads.leader
        if leader is not None and leader.since and now - leader.since > STUCK_AFTER:
            self._threads.hand_over(leader, leader.since)
        if not self._scheduler.waiting:
            return self._polling.looked
        with self._lock:
            self._scheduler.lend(now, self._threads.processor_time())
        self._wake_if_ready()
        return now

    def _wake_if_ready(self) -> None:
        """Wake the leader if it sleeps although works are ready. Must follow each change of the scheduler by a thread
        that does not lead: any of them may make works ready that waited for a slot.
        """
        if self._polling.asleep and self._scheduler.ready:
            self.poller.wake()

    # The leader's loop

    def _lead(self, runner: ReactorThread) -> None:
        try:
            self._run(runner)
        # Raised where even logging an error fails, for lack of memory or by a filter of the program. The exception must
        # not end this thread, which may be the leader: no other thread would take the lead. The work that had begun is
        # lost, but its slot is released.
        except Exception:
            time.sleep(NO_MEMORY_PAUSE)
            with self._lock:
                runner.since = 0.0
                if runner.counted is not None:
                    self._scheduler.end(runner.counted)
                    self._scheduler.retry()
                    runner.counted = None
            self._wake_if_ready()

    def _run(self, runner: ReactorThread) -> None:
        """Poll connections and run works in turn while this thread leads."""
        threads = self._threads
        while threads.leader is runner and not threads.closed:
            if self.unsent:
                self.send_unsent()
            try:
                self._polling.poll(alone=threads.are_idle)
            except OSError as error:
                if not threads.closed:
                    log.critical(
                        "telegrad: code in this process has closed file descriptors of its worker (%s): the worker "
                        "can no longer read connections. Functions may close only descriptors that they have opened "
                        "(os.closerange closes all). Restart the worker",
                        error,
                    )
                threads.closed = True
            until = perf_counter() + TURN
            with self._lock:
                if self._submitted:
                    self._scheduler.add(self._submitted)
                work, runner.counted = self._scheduler.next(self._scheduler.ready)
            while work is not None:
                work = self._run_one(runner, work, until)

    def _run_one(self, runner: ReactorThread, work: Work, until: float) -> Work | None:
        """Run a work; return this thread's next work, or None.

        A leader continues with ready works if this one began before `until`. A thread that no longer leads passes its
        slot to a call that waits for one.
        """
        threads, scheduler = self._threads, self._scheduler
        # Before the work, not by the timer after 4 ms: connections need not wait for a function that is long or not
        # known. The batched answers are sent first, because the next leader sends them only after it has been woken.
        if work.is_long and threads.leader is runner:
            self.send_unsent()
            threads.hand_over(runner)
        runner.since = runner.began = perf_counter()
        runner.waited = 0.0
        # After `since` was set, at which the timer looks when it wakes.
        if not self.timer.is_watching:
            self.timer.wake()
        try:
            work.run(work.argument)
        except BaseException:
            log.exception("telegrad: work of the agent failed")
        # Release the call, its arguments and its value here, while the timer still watches this thread: their end may
        # run user code.
        work.argument = None
        # `since` is cleared and the lead is looked at in one step. `hand_over` compares both under this lock, so the
        # timer cannot take the lead from a thread that goes on to poll.
        with self._lock:
            runner.since = 0.0
            queue, runner.counted = runner.counted, None
            leads = threads.leader is runner
            if self._submitted:
                scheduler.add(self._submitted)
            if queue is not None:
                scheduler.end(queue)
                if leads and scheduler.waiting:
                    scheduler.retry()
            # Only the leader takes from `ready`. A thread that has lost the lead passes the slot that it has just
            # released on to a call that waits for one, so that no thread must be woken for it. If it had no slot, it
            # has none to pass on.
            queues = scheduler.ready if leads else scheduler.waiting
            following = None
            if queues and (runner.began <= until if leads else queue is not None):
                following, runner.counted = scheduler.next(queues)
        if not leads:
            self._wake_if_ready()
        return following

    def _run_remaining(self) -> None:
        """After the close: run the works that other threads may wait for, and drop the rest."""
        with self._lock:
            self._scheduler.add(self._submitted)
            works = self._scheduler.clear()
        for work in works:
            try:
                work.run(work.argument)
            except BaseException:
                log.exception("telegrad: work of the agent failed")


class Polling:
    """Polls the connections for the leader: busily for a short while, then asleep in the kernel."""

    def __init__(self, scheduler: Scheduler, submitted: Collection[object]) -> None:
        self.poller = Poller()
        self.asleep = False
        self.looked = 0.0  # when the leader last polled all connections
        self._scheduler = scheduler
        self._submitted = submitted
        self._closed = False
        self._spins = False
        self._recent: Source | None = None  # the source that was ready last

    def close(self) -> None:
        """End the sleep of the leader, and let it sleep no more: a busy poll may already have read the wake-up."""
        self._closed = True
        self.poller.wake()

    def poll(self, alone: bool) -> None:
        """Wait for the connections and read those with data; return early if there are works to run.

        Poll busily only while `alone`: another thread, even one that waits for an answer, will want the interpreter.
        """
        ready, start = self._scheduler.ready, perf_counter()
        events = self._spin(start) if alone and self._spins and not ready else []
        if events is None:
            return
        if not events:
            self.asleep = True
            try:
                # `asleep` is set before this look, see `submit`. `_submitted` is read first: `Scheduler.add` adds
                # a work to `ready` before it removes it from `_submitted`. In the opposite order this thread could read
                # `ready` before the addition and `_submitted` after the removal, and sleep with a work in `ready`.
                events = self.poller.poll(0 if self._submitted or ready or self._closed else None)
            finally:
                self.asleep = False
        self.looked = perf_counter()
        is_soon = self.looked - start < MOMENT
        self._spins = False
        for source, mask in events:
            if mask & WRITE:
                source.on_writable()
            if mask & READ:
                _read(source)
                if source.prompt:
                    self._recent, self._spins = source, is_soon

    def _spin(self, start: float) -> list[tuple[Source, int]] | None:
        """Poll busily for a short while; return None if work has arrived.

        Stop early if another thread of the process is active: polling would keep the interpreter lock from it.
        """
        spin, recent = Spin(start, MOMENT, gives_way=True), self._recent
        while True:
            # The next frame of a conversation mostly comes from the source that was ready last. Reading it directly
            # takes one system call; a poll and a read take two. The time limit matters: the calls of a caller that
            # sends without end must run between two reads of it. A limit of 64 reads in place of a time kept the other
            # callers waiting for up to 64 turns.
            if recent is not None and start - self.looked < TURN and _read(recent):
                return None
            if self._scheduler.ready or self._submitted:
                return None
            self.looked = start
            events = self.poller.poll(0)
            if events or self._scheduler.busy or not spin.again():
                return events


def _read(source: Source) -> bool:
    """Read a source; log its errors, which must not end the leader."""
    try:
        return source.on_readable()
    except Exception:
        log.exception("telegrad: reading a connection failed")
        return False


# Messages that a waiting thread reads and handles itself. An answer then need not wake first the leader and then the
# waiting thread. The thread reads only for a moment, only while no other thread wants the processor, and only notices;
# calls are left to the leader.

_here = Here()  # works that this thread has read but not run yet


@in_child
def _help_nobody() -> None:
    """Drop the messages that the forking thread has read: the parent handles them."""
    _here.own = None


def submit_here(reactor: Reactor, work: Work, queue: WorkQueue | None = None) -> None:
    """Run the work on this thread if `run_for` has read it; otherwise submit it to the reactor in `queue`."""
    own: deque[Work] | None = _here.own
    if own is None:
        reactor.submit(work, queue)
    else:
        own.append(work)


def run_for(future: Any, links: Sequence[Link], reactor: Reactor) -> bool:
    """Read these connections and run their works until `future` is done (True) or nothing arrives for a moment."""
    own: deque[Work] = deque()
    before, _here.own = _here.own, own
    token = serving.set(None)  # the works do not belong to the call that this thread serves
    try:
        while not future.done():
            _read_for(future, links, own)
            if not own:
                break
            while own:
                work = own.popleft()
                while own:
                    reactor.submit(own.popleft())  # on other threads, since this work may wait for them
                work.run(work.argument)
        else:
            return True
    except Exception as error:
        if raised_by_handler(error):
            raise
        log.exception("telegrad: work of the agent failed")
    finally:
        _here.own = before
        serving.reset(token)
        for work in own:
            reactor.submit(work)
    return False


def _read_for(future: Any, links: Sequence[Link], own: deque[Work]) -> None:
    taken = [link for link in links if link.reading.take()]
    spin = None
    try:
        while taken:
            for link in taken:
                link.read()
            if own or future.done():
                break
            spin = spin or Spin(perf_counter(), MOMENT, gives_way=True)
            if not spin.again():
                break
    finally:
        for link in taken:
            link.stop_reading()
