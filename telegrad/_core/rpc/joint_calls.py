"""Operations of several workers at once, and the detection of workers that make no progress with them.

A long call, such as the writing of a checkpoint, may take any time, but each step of it has a limit. The callee counts
its steps. The caller periodically requests the count, with a call that needs no slot. A stopped process does not
answer, and a hanging one answers with the same count.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any, TypeVar

from telegrad._core.agent.call_each import EachCall
from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.calls import profiling
from telegrad._core.calls.call_names import known_as
from telegrad._core.calls.futures import Future, Signal
from telegrad._core.calls.settings import DEFAULT
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import listed
from telegrad._core.pickling.exceptions import rebuild
from telegrad._core.pickling.remote_text import safe_text_of
from telegrad._core.references import Id
from telegrad._core.rpc.remote_calls import rpc_async
from telegrad._core.rpc.rref import RRef
from telegrad._core.texts import Wait
from telegrad._core.transport.silence import Silence
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad._core.worker.value_access import EACH, methods
from telegrad.errors import CallTimeout, TelegradError, WorkersFailed

S = TypeVar("S")
T = TypeVar("T")

LONGEST = 3600.0  # seconds between two checks: locks have a maximal timeout
AT_FIRST = 0.01  # seconds in which a thread that waits for answers of several owners reads them one after the other


class StepCounter:
    def __init__(self, _: Any) -> None:
        self.count = 0

    def note(self) -> None:
        """Count a step, on any thread; if two threads do so at once, one step may be lost."""
        self.count += 1


def serve(worker: Worker) -> None:
    """Let other workers request the number of steps."""
    worker.agent.run_at_once(count_here)


@known_as("asking for the progress of a call")
def count_here() -> int:
    return current.here().attached(StepCounter).count


class StallWatch:
    """Checks the progress of callees; for one thread."""

    def __init__(self, calls: Mapping[str, Future[Any]], limit: float) -> None:
        """`calls` by workers; `limit` is that of one step in seconds, 0 for none."""
        self.errors: dict[str, CallTimeout] = {}  # of workers without progress; their calls were cancelled
        self._calls = calls
        self._limit = limit
        self._silences = {worker: Silence(limit) for worker in calls} if limit else {}
        self._counts: dict[str, int] = {}
        self._asked: dict[str, Future[int]] = {}
        self._due = monotonic() + min(limit / 3, LONGEST) if limit else inf

    @property
    def left(self) -> float:
        """Seconds until the next check."""
        return min(LONGEST, max(0.0, self._due - monotonic()))

    def look(self) -> None:
        """Check the workers whose calls are not done, if it is time."""
        now = monotonic()
        if now < self._due:
            return
        pause = LONGEST
        for worker, call in self._calls.items():
            if call.done():
                continue
            silence = self._silences[worker]
            if silence.look(now, self._gets_on(worker)):
                self.errors[worker] = CallTimeout(
                    f"worker {worker!r} made no progress for {self._limit:g} s (`rpc_timeout` in the options): its "
                    "process is stopped, hangs, or waits for a disk (see `telegrad why`). It may still continue"
                )
                call.cancel()
            pause = min(pause, silence.pause)
        self._due = now + pause

    def _gets_on(self, worker: str) -> bool:
        """Return True if the worker has reported a step since the last check; request the next count."""
        asked = self._asked.get(worker)
        # Another question would not be answered earlier: one at a time.
        if asked is not None and not asked.done():
            return False
        before = self._counts.get(worker)
        try:
            if asked is not None:
                self._counts[worker] = asked.wait()
            self._asked[worker] = rpc_async(worker, count_here, timeout=self._limit)
            self._asked[worker].heed()
        except TelegradError:  # the call itself will fail, too
            self._asked.pop(worker, None)
        return self._counts.get(worker) != before


def call_all(
    shares: Mapping[str, S],
    call: Callable[[str, S], Future[T]],
    doing: str = "",
    sizes: Mapping[str, int] | None = None,
    limit: float = 0,
    send: Callable[[], None] | None = None,
) -> dict[str, T]:
    """Call each worker with its share, all at once, and wait for all; return their values. If `doing` is given, such as
    "checkpoint.save: writing", log the progress, with bytes if `sizes` has those of each worker. `limit` is the limit
    of one step in seconds, 0 for none: see `StallWatch`. `send` is called before the wait. Raise WorkersFailed if more
    than one failed; where only one did, its own error is raised."""
    calls: dict[str, Future[T]] = {}
    values: dict[str, T] = {}
    errors: dict[str, BaseException] = {}
    stalled: Mapping[str, BaseException] = {}
    for worker, share in shares.items():
        try:
            calls[worker] = call(worker, share)
        except Exception as error:  # still call the others, as if this one had failed later
            if raised_by_handler(error):
                raise
            errors[worker] = error
    if send is not None:
        send()
    if doing or limit:
        watch = StallWatch(calls, limit)
        _follow(doing, calls, sizes or {}, watch)
        stalled = watch.errors
    for worker, future in calls.items():
        try:
            values[worker] = future.wait()
        except Exception as error:
            if raised_by_handler(error):
                raise
            errors[worker] = stalled.get(worker, error)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        failed = WorkersFailed(summary(f"{len(errors)} of {len(shares)} workers failed:", errors), errors)
        raise failed from first_cause(errors)
    return values


class _Answer(Signal):
    """The outcome of one call of `call_owners`."""

    __slots__ = ("about", "begun", "call")

    quick = True
    about: str
    begun: float
    call: Any  # set by `Agent.call_each`


def call_owners(
    references: Mapping[str, RRef[Any]], method: str, args: Any, asked: str, known: Mapping[str, tuple[bool, Any]]
) -> dict[str, Any]:
    """Call a method of the values of references, by worker, as `call_all`; `asked` is the user's name of the calls.
    `known` has outcomes of workers that need no call: True and a result, or False and the bytes of an error."""
    # Results are plain values, such as numbers: the thread that reads an answer opens it, as in all `quick` outcomes.
    agent = current.agent()
    ids: dict[str, Id] = {}
    callees: list[Any] = []  # an `EachCall` each

    def begin(worker: str, reference: RRef[Any]) -> Any:
        if profiling.wanted() and worker not in known:  # each call is an event
            return reference._call_async(method, DEFAULT, args, {}, asked)
        answer = _Answer()
        if worker not in known:
            callees.append(EachCall(answer, reference._reach()))
            ids[worker] = reference._handle.id
        elif known[worker][0]:
            answer.set_result(known[worker][1])
        else:
            raise rebuild(known[worker][1])
        return answer

    def send() -> None:
        # The arguments are encoded once for all calls. The reactor does not read the answers at first: its leader would
        # be woken for each, and take the interpreter from this thread, which is about to read the answer anyway. It
        # reads late ones, since calls whose answers are not read time out, and this thread may wait long for the first.
        until = monotonic() + AT_FIRST
        try:
            agent.call_each(callees, PreparedCall(methods.of(EACH + method), (ids, *args), None, references, asked))
            for each in callees:
                if (pending := getattr(each.outcome, "call", None)) is not None:
                    pending.help(until)
        finally:
            for each in callees:
                if not each.outcome.done() and (pending := getattr(each.outcome, "call", None)) is not None:
                    pending.peer.connection.read_in_background()
        for each in callees:
            if not each.outcome.done():
                agent.wait_for(each.outcome)

    return call_all(references, begin, send=send)


def _follow(doing: str, calls: Mapping[str, Future[Any]], sizes: Mapping[str, int], watch: StallWatch) -> None:
    """Wait until all calls are done or make no progress; log the unfinished workers if `doing` is given."""
    # Counts the ends, in any order: waiting for one call after the other would not notice that a later one makes no
    # progress.
    done = threading.Semaphore(0)
    for future in calls.values():
        future.add_done_callback(lambda _: done.release())

    def missing() -> list[str]:
        return [worker for worker, future in calls.items() if not future.done()]

    def text() -> str:
        late = missing()
        written = _written(sizes, late)
        names = listed([repr(worker) for worker in late])
        return f"{doing}: {len(calls) - len(late)} of {len(calls)} workers are done{written}; waiting for {names}"

    with contextlib.ExitStack() as stack:
        looks: list[Wait | StallWatch] = [watch]
        if doing:
            agent = current.agent()
            looks.append(stack.enter_context(Wait(doing.partition(":")[0], text, missing, worker=agent.name)))
            stack.enter_context(agent.waiting())
        for _ in calls:
            while not done.acquire(timeout=min(each.left for each in looks)):
                for each in looks:
                    each.look()


def _written(sizes: Mapping[str, int], late: list[str]) -> str:
    total = sum(sizes.values())
    if not total:
        return ""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f", with {(total - sum(sizes.get(worker, 0) for worker in late)) / unit:.1f} of {total / unit:.1f} {name}"


def summary(heading: str, errors: Mapping[Any, BaseException]) -> str:
    """Return the text of an error of several workers, or of several items with these numbers."""
    lines = [heading]
    for key, error in errors.items():
        # It never raises, as the `__str__` of the error may: the future of the calls would not be completed.
        said = safe_text_of(error).partition("\n")[0]
        lines.append(f"  {key if isinstance(key, str) else f'item {key}'}: {type(error).__name__}: {said}")
    return "\n".join(lines)


def first_cause(errors: Mapping[Any, BaseException]) -> BaseException:
    """Return the first error that is no timeout, if there is one: the others may have waited for that worker."""
    return min(errors.values(), key=lambda error: isinstance(error, CallTimeout))
