"""The threads of a worker, which pass on the lead, its timer thread, and its event loop.

One thread leads and runs the loop of the reactor; the others run long work or wait to lead. The timer thread watches
the leader, and ends calls that have timed out. The event loop of asyncio runs the `async def` functions that other
workers call.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from time import monotonic, perf_counter, sleep
from typing import Any

from telegrad._core import forks
from telegrad._core.calls.futures import run_on
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.threads import Background, Here, Thread, program_has_ended

STANDBY = 16  # idle threads that are kept: creating one costs more than most calls
LAST_WORK = 0.2  # seconds that the end of a worker waits for each of its threads; one in user code ends later

log = logging.getLogger("telegrad")


class ReactorThread:
    """The state of one thread. Only that thread writes it; it writes `since` = 0 and `counted` under the lock."""

    __slots__ = ("began", "counted", "since", "waited", "wakeup")

    def __init__(self) -> None:
        self.wakeup = threading.Lock()  # held while the thread waits for the lead; released to wake it
        self.wakeup.acquire()
        self.began = self.since = 0.0  # when its last work began, and when the work that it runs now began
        self.waited = 0.0  # when its current work first waited for something
        self.counted: WorkQueue | None = None  # the queue of the call that it runs


class LeaderThreads:
    """Passes the lead from thread to thread."""

    def __init__(
        self, lock: Any, entered: Callable[[], None], lead: Callable[[ReactorThread], None], ended: Callable[[], None]
    ) -> None:
        """`entered` is the first function called on each thread; a leading thread calls `lead`; the last thread calls
        `ended`.

        `lock` guards `leader`, `closed` and all fields below. It is not held during these calls.
        """
        self.lock = lock
        self.leader: ReactorThread | None = None  # a thread may check without the lock if it leads
        self.closed = False
        self._entered = entered
        self._lead = lead
        self._ended = ended
        self._standby: list[ReactorThread] = []
        self._threads: dict[ReactorThread, threading.Thread] = {}
        self._lacks_threads = False  # since the last one that could be started; the first failure is logged
        self.here = Here()  # `own` is the `ReactorThread` that runs this code, if any

    @property
    def are_idle(self) -> bool:
        """Whether all threads but the leader wait for the lead, so that none runs or waits within a work."""
        return len(self._threads) == len(self._standby) + 1

    def start(self) -> None:
        with self.lock:
            leader = self.leader = ReactorThread()
        self._spawn(leader)

    def close(self, wake: Callable[[], None]) -> None:
        """End the threads; `wake` wakes the leader. A thread in user code ends after that code returns."""
        with self.lock:
            self.closed = True
            while self._standby:
                self._standby.pop().wakeup.release()
            threads = list(self._threads.values())
        wake()
        for thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():  # an unstarted thread ends by itself
                thread.join(LAST_WORK)

    def processor_time(self) -> float | None:
        """Return the processor time of the threads that run calls, if known. Hold the lock, which keeps them alive."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return None
        idents = [thread.ident for runner, thread in self._threads.items() if runner.counted is not None]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in idents if each)

    def hand_over(self, runner: ReactorThread, since: float | None = None) -> None:
        """Pass the lead to another thread, if `runner` still leads (and still runs its work begun at `since`)."""
        with self.lock:
            if self.leader is not runner or self.closed or (since is not None and runner.since != since):
                return
            # The new leader is chosen under the lock, and its thread is started outside of it: a start waits until the
            # thread runs, which takes long if memory is short, and no thread of this package starts another one under a
            # lock.
            if self._wake_standby():
                return
            new = self.leader = ReactorThread()
        try:
            self._spawn(new)
            self._lacks_threads = False
        except (RuntimeError, MemoryError) as error:
            with self.lock:
                if self.leader is new:
                    # The start may have taken long. If `runner` has ended its work meanwhile, it stands by, or has
                    # ended because enough others do; it must then not get the lead in its sleep.
                    if self._wake_standby():
                        return
                    self.leader = runner
            level = logging.DEBUG if program_has_ended() or self._lacks_threads else logging.WARNING
            self._lacks_threads = True
            log.log(level, "telegrad: %s; a busy thread remains the leader, and the timer tries again", error)

    def _wake_standby(self) -> bool:
        """Give the lead to a thread that stands by, with the lock held; return False if there is none."""
        if not self._standby:
            return False
        self.leader = self._standby.pop()
        self.leader.wakeup.release()
        return True

    def _spawn(self, runner: ReactorThread) -> None:
        thread = Thread(target=self._main, args=(runner,), name="telegrad-worker")
        with self.lock:
            self._threads[runner] = thread
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # the process has no memory or no free thread
            with self.lock:
                del self._threads[runner]
            raise

    def _main(self, runner: ReactorThread) -> None:
        self.here.own = runner
        try:
            self._entered()
            while not self.closed and (self.leader is runner or self._wait_for_lead(runner)):
                self._lead(runner)
        finally:
            with self.lock:
                del self._threads[runner]
                # The last thread closes the poller. Any earlier, a leader could still be asleep in its descriptors.
                is_last = self.closed and not self._threads
            if is_last:
                self._ended()

    def _wait_for_lead(self, runner: ReactorThread) -> bool:
        """Wait for the lead; return False if the thread must end instead."""
        with self.lock:
            if self.leader is runner:
                return True
            if self.closed or len(self._standby) >= STANDBY:
                return False
            # Under the same lock in which `hand_over` takes a thread from `_standby`: the release of `wakeup` cannot be
            # missed, since `wakeup` is a lock that stays released until this thread acquires it.
            self._standby.append(runner)
        runner.wakeup.acquire()
        return not self.closed


WATCH_EVERY = 5e-3
LONGEST_PAUSE = 1.0  # between ticks
QUIET_AFTER = 40  # calls of `watch` without new work until the thread stops watching


class TimerThread:
    """Calls `tick(now)` when its last result is due, and `watch(now)` every 5 ms while works run."""

    def __init__(self, tick: Callable[[float], float]) -> None:
        self._tick = tick
        self._alarm = threading.Lock()  # held while the thread may sleep; released to wake it
        self._alarm.acquire()
        self._lock = threading.Lock()  # guards changes of _due
        self._due = 0.0
        self.is_watching = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, watch: Callable[[float], float]) -> None:
        """Start the thread; `watch` returns a value that changes if anything has happened since its last call."""
        self._thread = Thread(target=self._main, args=(watch,), name="telegrad-clock")
        self._thread.start()

    def wake(self) -> None:
        """Call `watch` now, and then regularly."""
        with contextlib.suppress(RuntimeError):  # already awake
            self._alarm.release()

    def wake_by(self, when: float, rough: bool = False) -> None:
        """Call `tick` at `when` at the latest; if `rough`, up to milliseconds later, which can save a wake-up."""
        # Callers store their deadline where `tick` looks for it, and call this afterwards. If `_due` is read here just
        # before a tick begins, `when` seems to be late enough, and nothing is stored: that tick finds the deadline.
        # Likewise `_due` is stored before `is_watching` is read, and the timer reads `_due` after it stops watching.
        if when < self._due:
            with self._lock:
                self._due = min(self._due, when)
            if not (rough and self.is_watching):
                self.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _main(self, watch: Callable[[float], float]) -> None:
        while not self._closed:
            try:
                self._run(watch)
            except Exception:  # this thread must survive: it ends calls that would wait forever
                sleep(WATCH_EVERY)
                with contextlib.suppress(Exception):  # no memory, or an error of a filter of the program
                    log.exception("telegrad: the agent's tick failed")

    def _run(self, watch: Callable[[float], float]) -> None:
        quiet, seen = 0, -1.0
        while not self._closed:
            now = monotonic()
            if now >= self._due:
                with self._lock:
                    # Set before the tick, and lowered after it: `wake_by` can store an earlier time while the tick
                    # runs. If the tick fails, this is the time of the next one.
                    self._due = now + LONGEST_PAUSE
                upcoming = self._tick(now)
                with self._lock:
                    self._due = min(self._due, upcoming)
            before, seen = seen, watch(perf_counter())
            quiet = quiet + 1 if seen == before else 0
            self.is_watching = quiet < QUIET_AFTER
            pause = max(0.0, self._due - monotonic())
            self._alarm.acquire(timeout=min(pause, WATCH_EVERY) if self.is_watching else pause)


SPIN = 250e-6  # seconds that a thread polls for the answer to its call; longer would delay calls to its own worker
SOON = 400e-6  # busy waiting pays off only if the last wait was shorter
DISTURBED = 50e-6  # a loop that takes this long shows that another thread has the interpreter

_yield = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Busy-wait before sleeping, because waking a sleeping thread costs as much as the wait."""

    __slots__ = ("_gives_way", "_last", "_until")

    def __init__(self, start: float, seconds: float = SPIN, gives_way: bool = False) -> None:
        """With `gives_way`, end as soon as another thread of the process wants the interpreter."""
        self._last = start
        self._until = start + seconds
        self._gives_way = gives_way

    def again(self) -> bool:
        """Yield the processor to other threads; return True to poll again, False to sleep."""
        before, now = self._last, perf_counter()
        if now > self._until or (self._gives_way and now - before > DISTURBED):
            return False
        self._last = now
        _yield()
        return True


class EventLoop:
    """An asyncio event loop that starts on first use, on its own thread."""

    def __init__(self, entered: Callable[[], None]) -> None:
        """`entered` is the first function called on that thread."""
        self._entered = entered
        self._lock = threading.Lock()  # guards _closed and _begun; `runs_here` reads that without the lock
        self._closed = False
        self._begun: tuple[asyncio.AbstractEventLoop, Background] | None = None
        # Strong references to running coroutines: asyncio keeps only weak ones. No lock: each use is one set operation.
        self._running: set[Future[None]] = set()

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine soon. If the loop cannot start, close the coroutine and raise; the next call tries again."""
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this worker has left its group")
                if self._begun is None:
                    loop = asyncio.new_event_loop()
                    self._begun = loop, Background("telegrad-asyncio", partial(self._main, loop))
                loop, thread = self._begun
                thread.want()  # with the lock, as no other coroutine may wait for a thread that fails to start
            running = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except BaseException:
            coroutine.close()
            raise
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def stopper(self, may: Callable[[], bool]) -> Callable[[], None]:
        """Return a function for any thread that cancels the current task, if `may()` then returns True."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        # Asked on the thread of the loop, not by the thread that cancels: until the loop gets here, the coroutine may
        # have ended its part of the call, and the task must then run on.
        def stop() -> None:
            if may():
                task.cancel()

        return partial(run_on, loop, stop)

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        self._entered()
        asyncio.set_event_loop(loop)
        while not self._has_run(loop):
            pass
        # One round of the loop lets each task handle its cancellation. A task that needs more rounds is abandoned.
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def _has_run(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Run the loop. Return False if user code ended it: by `stop`, SystemExit or KeyboardInterrupt."""
        what = "the event loop was stopped"
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # its caller gets that exception
            forks.exit_if_user_code_ended()
            what = f"{error!r} was raised"
        if self._begun is not None:
            log.warning("telegrad: %s in a task or a callback of asyncio; the event loop continues", what)
        return self._begun is None  # asyncio may have lost the request to stop

    def runs_here(self) -> bool:
        begun = self._begun
        try:
            return begun is not None and asyncio.get_running_loop() is begun[0]
        except RuntimeError:  # no loop runs in this thread
            return False

    def close(self) -> None:
        with self._lock:
            self._closed, begun, self._begun = True, self._begun, None
        if begun is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: an exception has just ended it
                begun[0].call_soon_threadsafe(begun[0].stop)
            # The program may end next, and would interrupt the thread in the middle of closing the loop. asyncio then
            # prints an error, as it closes the loop again.
            begun[1].join(LAST_WORK)
