"""The threads of one worker: who reads, who runs, and how they take turns.

One thread leads: it waits for the connections, reads frames, and starts the work that they bring. Handing work to
another thread costs more than most functions take, so the leader runs by itself what is expected to be short. It
gives the lead away

    before    work that is known to be long, or not known yet;
    at        any wait of this package (`waiting()`), however deep in the work;
    after     a few milliseconds at the latest: the watch takes it from a leader that is stuck in its work.

So no connection waits for user code, whatever it does, and short calls cross no thread. Calls are counted: at most
`slots` of them run at once. A call that waits does not count, so nested calls cannot use up the threads.

The works of each caller are in a queue of their own (`slots`). The leader takes one work of each queue in turn, and
looks at all connections after every TURN seconds, so that a caller that sends without end delays the others by no more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter

from telegrad.agent.slots import Slots
from telegrad.agent.spinning import SOON, Spin
from telegrad.agent.works import IDLE, LONG, OWED, QUICK, Runner, Work, WorkQueue
from telegrad.contracts import guarded, new_lock
from telegrad.descriptors import report_closed
from telegrad.threads import Thread, processor_time, program_has_ended
from telegrad.transport.poller import READ, WRITE, Poller, Source

STUCK_AFTER = 4e-3  # a leader this long in its work loses the lead
PUT_OFF = 64  # works at most that wait for an idle moment
TURN = 5e-4  # seconds until the leader looks at all connections again; so long do 64 quick calls take
NO_MEMORY_PAUSE = 0.01  # seconds until a thread goes on that found no memory
WORK_FAILED = "telegrad: work of the agent failed"
STANDBY = 16  # idle threads that are kept: to make one costs more than most calls

log = logging.getLogger("telegrad")


class Reactor:
    """Reads connections and runs work, on threads of its own."""

    def __init__(self, slots: int, most_waiting: int, entered: Callable[[], None], watch: Callable[[], None]) -> None:
        """`entered` is called first on each new thread, `watch` whenever `unstick` must soon be called regularly."""
        self.poller = Poller()
        self._entered = entered
        self._start_watch = watch
        self._most_waiting = most_waiting
        self._lock = new_lock()  # guards _leader, _standby, _slots, _threads, changes of _closed, ends of Runner.since
        self._slots: Slots = guarded(Slots(slots), self._lock, ("busy", "count", "waiting", "has_waiting"))
        self._leader: Runner | None = None  # peeked at by who asks whether it leads: what it finds, only it changes
        self._standby: list[Runner] = []
        self._threads: dict[Runner, threading.Thread] = {}
        self._ready: deque[Work | WorkQueue] = deque()
        self._own: WorkQueue = WorkQueue()  # of works for which no caller stands
        self._idle_work: deque[Work] = deque()
        self._asleep = False  # the leader waits in the poller
        self._spinning = False
        self._looked = 0.0  # when the leader last looked at all connections
        self._recent: Source | None = None  # the source that was ready last
        self._unsent: set[Source] = set()  # sources with answers that wait for the batch to end
        self._closed = False
        self._local = threading.local()
        self.watched = False  # somebody calls `unstick`
        self.runs = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._threads)} threads, {len(self._ready)} works to begin"
        return f"<Reactor: {state}; {self._slots!r}>"

    # What others ask for

    def start(self) -> None:
        with self._lock:
            leader = self._leader = Runner()
        self._spawn(leader)

    def submit(self, work: Work, queue: WorkQueue | None = None) -> None:
        """Have `work` run soon, from any thread; in the turn of `queue`, if one is given."""
        if queue is None and work.cost in (QUICK, LONG):
            queue = self._own
        if work.cost == IDLE and len(self._idle_work) < PUT_OFF:
            self._idle_work.append(work)
        elif queue is None:
            self._ready.append(work)
        elif queue.append(work):
            self._ready.append(queue)
        if self._asleep:
            self.poller.wake()
        if self._closed:
            self._drop_ready()

    def hold_up(self, queue: WorkQueue, is_held_up: bool) -> None:
        """Let no further work of a queue begin, or let them begin again."""
        with self._lock:
            queue.is_held_up = is_held_up
            started = not is_held_up and self._release_waiting()
        if started:
            self.poller.wake()

    def drop(self, queue: WorkQueue, is_unwanted: Callable[[Work], bool]) -> list[Work]:
        """Remove works from a queue; return those that were removed."""
        unwanted = {id(work): work for work in queue.works.copy() if is_unwanted(work)}
        with self._lock:
            return [unwanted[each] for each in queue.drop(set(unwanted))]

    def batches(self) -> bool:
        """Whether what this thread sends may wait for the end of a batch of work: only the leader has those."""
        return bool(self._ready) and self._leads()

    def sent_later(self, source: Source) -> None:
        """After something was left in the outbox of `source`: the leader, or the clock's next tick, will send it."""
        self._unsent.add(source)
        if self.on_worker() and not self._leads():  # the lead was taken from this thread meanwhile
            self.send_unsent()

    def _leads(self) -> bool:
        return self._leader is not None and getattr(self._local, "worker", None) is self._leader

    def on_worker(self) -> bool:
        """Whether this thread is one of the reactor's."""
        return hasattr(self._local, "worker")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around every wait: the thread gives up the lead and its slot meanwhile."""
        worker: Runner | None = getattr(self._local, "worker", None)
        if worker is None:
            yield
            return
        counted = worker.counted
        worker.waited = worker.waited or perf_counter()
        with self._lock:
            leads = self._leader is worker
            if counted is not None:
                self._slots.pause(counted)
                worker.counted = None
            started = self._release_waiting()
        if leads:
            self.send_unsent()
            self._pass_lead(worker)
        elif started:
            self.poller.wake()
        try:
            yield
        finally:
            if counted is not None:
                with self._lock:
                    self._slots.resume(counted)
                worker.counted = counted

    def worked_until(self) -> float:
        """When the work of this thread first waited, or now."""
        worker: Runner | None = getattr(self._local, "worker", None)
        return worker.waited if worker is not None and worker.waited else perf_counter()

    @property
    def backed_up(self) -> bool:
        """Whether calls wait for a slot."""
        return self._slots.has_waiting

    @property
    def is_behind(self) -> bool:
        """Whether more waits for a thread than should."""
        return len(self._ready) >= self._most_waiting

    def unstick(self, now: float) -> None:
        """Take the lead from a leader that is stuck in its work, and see to calls that wait in vain."""
        leader = self._leader
        if leader is not None and leader.since and now - leader.since > STUCK_AFTER:
            self._pass_lead(leader, leader.since)
        if self._slots.has_waiting:
            self._watch_slots(now)

    def _watch_slots(self, now: float) -> None:
        """Where calls wait for those that sleep, let one more begin."""
        with self._lock:
            # Meanwhile they cannot end: the clock of a thread that has ended must not be asked.
            running = [thread for worker, thread in self._threads.items() if worker.counted is not None]
            lent = self._slots.lend(now, processor_time(running))
            if lent:
                self._release_waiting()
        if lent:
            self.poller.wake()

    def stands_for(self, now: float) -> float:
        """Return for how many seconds no thread has looked at the connections, though some should have."""
        return 0.0 if self._asleep else now - self._looked

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits for its turn."""
        return not (self._slots.busy or self._slots.waiting or self._ready or self._idle_work)

    def close(self) -> None:
        """End the threads; work that was not begun is dropped unless it is owed, work that runs is left to end."""
        with self._lock:
            self._closed = True
            while self._standby:
                self._standby.pop().wakeup.release()
            threads = list(self._threads.values())
        self.poller.wake()
        for thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():  # else it ends as it begins
                thread.join(0.2)  # a thread in user code ends when that code does
        self._drop_ready()
        self._idle_work.clear()
        with self._lock:
            self._slots.waiting.clear()

    def _drop_ready(self) -> None:
        """Once closed: do what is owed on this thread."""
        with contextlib.suppress(IndexError):  # it is empty
            while True:
                work = self._ready.popleft()
                if isinstance(work, Work) and work.cost == OWED:
                    self._do(work)

    # The threads

    def _spawn(self, worker: Runner) -> None:
        thread = Thread(target=self._main, args=(worker,), name="telegrad-worker")
        with self._lock:
            self._threads[worker] = thread
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # the process has no memory, or no thread left
            with self._lock:
                del self._threads[worker]
            raise

    def _main(self, worker: Runner) -> None:
        self._local.worker = worker
        try:
            self._entered()
            while not self._closed and (self._leader is worker or self._stand_by(worker)):
                try:
                    self._lead(worker)
                except MemoryError:
                    self._recover(worker)
        finally:
            with self._lock:
                del self._threads[worker]
                last = self._closed and not self._threads
            if last:
                self.poller.close()

    def _recover(self, worker: Runner) -> None:
        """There was no memory, even to tell: who leads must not end for that. What it had begun is lost."""
        time.sleep(NO_MEMORY_PAUSE)
        with self._lock:
            worker.since = 0.0
            self._end_call(worker)

    def _stand_by(self, worker: Runner) -> bool:
        """Wait to be given the lead; False where the thread shall end."""
        with self._lock:
            if self._leader is worker:
                return True
            if self._closed or len(self._standby) >= STANDBY:
                return False
            self._standby.append(worker)
        worker.wakeup.acquire()
        return not self._closed

    def _pass_lead(self, worker: Runner, since: float | None = None) -> None:
        """Make another thread lead, if `worker` does still (and is still in the work it began at `since`)."""
        with self._lock:
            if self._leader is not worker or self._closed or (since is not None and worker.since != since):
                return
            new = None
            if self._standby:
                self._leader = self._standby.pop()
                self._leader.wakeup.release()
            else:
                new = self._leader = Runner()
        if new is None:
            return
        try:
            self._spawn(new)
        except (RuntimeError, MemoryError) as error:
            with self._lock:
                if self._leader is new:
                    self._leader = worker
            level = logging.DEBUG if program_has_ended() else logging.WARNING
            log.log(level, "telegrad: %s; a thread that works goes on leading, and the clock tries again", error)

    def _lead(self, worker: Runner) -> None:
        ready = self._ready
        began = until = 0.0
        self.send_unsent()
        while self._leader is worker and not self._closed:
            if not ready or began > until:
                if self._unsent:
                    self.send_unsent()
                try:
                    self._poll()
                except OSError as error:
                    self._closed = self._closed or report_closed(error)
                until = perf_counter() + TURN
                continue
            following = ready.popleft()
            if isinstance(following, WorkQueue):  # whose turn it is
                with self._lock:
                    work, has_more = self._slots.begin(following)
                    if work is not None and following.has_slots:
                        worker.counted = following
                if has_more:
                    ready.append(following)
                if work is None:
                    continue
            else:
                work = following
            del following
            if work.cost == LONG:
                self.send_unsent()
                self._pass_lead(worker)
                worker.waited = 0.0
                self._do(work)
                self._run_waiting(worker, work)
            else:
                began = self._run_leading(worker, work)
            del work  # and what it holds, before waiting for more

    def _run_leading(self, worker: Runner, work: Work) -> float:
        """Run short work without giving the lead away, watched; return the time at which it began."""
        worker.since = began = perf_counter()
        worker.waited = 0.0
        self.runs += 1
        if not self.watched:
            self._start_watch()
        try:  # as `_do`, in place, since this is done for each call
            work.run(work.argument)
        except BaseException:
            log.exception(WORK_FAILED)
        with self._lock:
            worker.since = 0.0
            still = self._leader is worker
            if still and (counted := worker.counted) is not None:
                self._slots.end(counted)
                worker.counted = None
                if self._slots.waiting:
                    self._release_waiting()
        if not still:
            self._run_waiting(worker, work)
        return began

    def _run_waiting(self, worker: Runner, ended: Work) -> None:
        """A thread that does not lead has ended a call: its slot goes to the calls that wait for one."""
        ended.argument = None  # the frames below this one keep `ended` for as long as the next calls run
        while worker.counted is not None:
            with self._lock:
                self._end_call(worker)
                queue, work, has_more = self._slots.next()
                worker.counted = queue
            if queue is not None and has_more:
                self._ready.append(queue)
                self.poller.wake()
            if work is not None:
                worker.waited = 0.0
                self._do(work)

    @staticmethod
    def _do(work: Work) -> None:
        try:
            work.run(work.argument)
        except BaseException:
            log.exception(WORK_FAILED)

    def _end_call(self, worker: Runner) -> None:
        """With the lock held: a call has ended, if it was one."""
        if worker.counted is not None:
            self._slots.end(worker.counted)
            worker.counted = None

    def _release_waiting(self) -> bool:
        """With the lock held: let the leader start calls for which there are slots now."""
        free = self._slots.free()
        self._ready.extendleft(reversed(free))
        return bool(free)

    def send_unsent(self) -> None:
        """Let go what was to be sent later."""
        while self._unsent:
            try:
                source = self._unsent.pop()
            except KeyError:  # emptied by two threads at once
                return
            source.on_writable()

    # Waiting for the connections

    def _poll(self) -> None:
        start = perf_counter()
        events = self._spin(start) if self._spinning and not self._ready else []
        if events is None:
            return
        if not events:
            self._asleep = True
            try:
                events = self.poller.poll(0 if self._ready or self._idle_work or self._closed else None)
            finally:
                self._asleep = False
        if not events and self._idle_work and not self._ready:
            self._ready.append(self._idle_work.popleft())
            return
        self._looked = perf_counter()
        soon = self._looked - start < SOON
        self._spinning = False
        for source, mask in events:
            if mask & WRITE:
                source.on_writable()
            if mask & READ:
                _read(source)
                if source.prompt:
                    self._recent, self._spinning = source, soon

    def _spin(self, start: float) -> list[tuple[Source, int]] | None:
        """Look again for a short while; None where work came meanwhile.

        Not while another thread of the process has something to do: it would wait for the interpreter again and again.
        """
        spin, recent = Spin(start, gives_way=True), self._recent
        while True:
            # Bounded by time: a caller that sends without end is read here again and again, and its calls are run.
            if recent is not None and start - self._looked < TURN and _read(recent):
                return None
            if self._ready:
                return None
            self._looked = start
            if self._idle_work:
                return []
            events = self.poller.poll(0)
            if events or self._slots.busy or not spin.again():
                return events


def _read(source: Source) -> bool:
    """A source that fails must not take the leader with it."""
    try:
        return source.on_readable()
    except Exception:
        log.exception("telegrad: reading a connection failed")
        return False
