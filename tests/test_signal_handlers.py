"""Handlers of signals run in code of the user and in blocking calls, and nowhere else in this package."""

import _thread
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, TypeVar

import pytest

from telegrad._core import interrupts
from tests.cluster import takes_less_than

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows wakes no thread by a signal")

LIMIT = 5.0
F = TypeVar("F", bound=Callable[..., Any])


steps: list[str] = []


def of_package(function: F) -> F:
    """Return the same function as a function of the package."""
    own = {**globals(), "__name__": "telegrad.sample"}
    return FunctionType(function.__code__, own, function.__name__, function.__defaults__)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def interrupted_by_default() -> Iterator[None]:
    steps.clear()
    interrupts.install()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupts_of(function: Callable[..., object], *args: Any) -> int:
    """Return the number of interrupts during the function or right after it: 0 to 2."""
    try:
        try:
            function(*args)
            settle()
        except KeyboardInterrupt:
            settle()
            return 1
    except KeyboardInterrupt:
        return 2
    return 0


def settle() -> None:
    while interrupts._deferred:
        pass


def arrive() -> None:
    _thread.interrupt_main()


def arrive_soon(after: float = 0.02) -> None:
    threading.Timer(after, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()


@of_package
def changes_in_steps() -> str:
    steps.clear()
    _thread.interrupt_main()
    for step in range(3):
        steps.extend(str(step))
    return "the result"


def goes_on() -> None:
    _thread.interrupt_main()
    steps.append("behind")


@of_package
def calls(function: Callable[[], None]) -> None:
    function()
    steps.append("behind")


class Sends(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        arrive()
        steps.append("emitted")


@of_package
def logs() -> None:
    logging.getLogger("tests.interrupts").error("something")
    steps.append("behind")


logging.getLogger("tests.interrupts").addHandler(Sends())
logging.getLogger("tests.interrupts").propagate = False


def imports(source: str) -> None:
    """Run the source as a module of the package that is imported."""
    module = {"__name__": "telegrad.sample", "arrive": arrive, "sleep": time.sleep, "steps": steps}
    exec(compile(f"{source}\nsteps.append('imported')", "sample.py", "exec"), module)


class Finalized:
    def __del__(self) -> None:
        arrive()
        steps.append("finalized")


@of_package
def drops(value: list[Any]) -> None:
    value.clear()
    steps.append("behind")


@interrupts.uninterrupted
def _ends() -> None:
    time.sleep(0.1)
    steps.append("ended")


ends = of_package(_ends)
BLOCKS = "sleep(0.1)"


@pytest.mark.parametrize(
    ("function", "args", "done"),
    [
        pytest.param(changes_in_steps, (), ["0", "1", "2"], id="code of the package is not interrupted"),
        pytest.param(goes_on, (), [], id="code of the user is, at once"),
        pytest.param(calls, (arrive,), [], id="code of the user that the package calls, too"),
        pytest.param(logs, (), ["emitted", "behind"], id="a handler of logging does not interrupt the package"),
        pytest.param(imports, ("arrive()",), ["imported"], id="an import of the package is not interrupted"),
        pytest.param(imports, (BLOCKS,), ["imported"], id="nor one that blocks"),
        pytest.param(drops, ([Finalized()],), ["finalized", "behind"], id="none is lost in a finalizer"),
        pytest.param(ends, (), ["ended"], id="nor a function that is marked"),
    ],
)
def test_an_interrupt_arrives_once_and_where_it_may(function: Callable[..., Any], args: Any, done: list[str]) -> None:
    if function is ends or args == (BLOCKS,):
        arrive_soon()
    assert interrupts_of(function, *args) == 1
    assert steps == done


@of_package
def sleeps() -> None:
    try:
        time.sleep(LIMIT)
    finally:
        _thread.interrupt_main()  # a second interrupt, during the cleanup
        for step in range(3):
            steps.extend(str(step))


@pytest.mark.parametrize(("function", "args", "shown"), [(goes_on, (), False), (calls, (arrive,), True)])
def test_the_frame_that_runs_a_handler_is_left_out_in_code_of_the_user(function: Any, args: Any, shown: bool) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        function(*args)
    assert (interrupts.__file__ in {str(entry.path) for entry in caught.traceback}) == shown


def test_a_blocking_call_is_interrupted_and_its_cleanup_is_not() -> None:
    arrive_soon()
    with takes_less_than(LIMIT / 2):
        assert interrupts_of(sleeps) == 2
    assert steps == ["0", "1", "2"]


@of_package
def waits_on_a_condition(condition: threading.Condition) -> None:
    with condition:
        condition.wait(LIMIT)


def test_a_condition_is_usable_after_an_interrupt() -> None:
    condition = threading.Condition(threading.Lock())
    arrive_soon()
    assert interrupts_of(waits_on_a_condition, condition) == 1
    assert condition.acquire(blocking=False)
    condition.release()


@of_package
def takes(lock: threading.Lock) -> None:
    with lock:
        steps.append("has it")


def test_taking_a_lock_with_a_with_statement_is_not_interrupted() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.1, lock.release).start()
    arrive_soon()
    assert interrupts_of(takes, lock) == 1
    assert steps == ["has it"]
    assert not lock.locked()


@interrupts.waiting_loop
def _looks_again(until: float) -> None:
    while time.monotonic() < until:
        pass


looks_again = of_package(_looks_again)


def test_a_waiting_loop_is_interrupted_although_it_never_blocks() -> None:
    begun = time.monotonic()
    arrive_soon()
    assert interrupts_of(looks_again, begun + LIMIT) == 1
    assert time.monotonic() - begun < LIMIT / 2


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    _thread.interrupt_main()
    steps.append("entered")
    try:
        yield
    finally:
        _thread.interrupt_main()
        steps.append("left")


entered = contextlib.contextmanager(of_package(_entered.__wrapped__))  # type: ignore[attr-defined]


def test_entering_and_leaving_a_context_manager_is_not_interrupted() -> None:
    def use() -> None:
        with entered():
            settle()

    assert interrupts_of(use)
    assert steps == ["entered", "left"]


def test_a_handler_runs_once_for_a_signal_that_waited_long() -> None:
    count = 0

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGINT, handler)
    for _ in range(5):  # the signal is sent again about twenty times in each round
        count = 0
        arrive_soon(0.0)
        ends()
        settle()
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            settle()
        assert count == 1


class KickedAtRelease:
    """The lock of the deferrals; a kick arrives as the main thread releases it for the first time."""

    def __init__(self) -> None:
        self.lock = interrupts._lock
        self.kicks = [_thread.interrupt_main]

    @of_package
    def __enter__(self) -> None:
        self.lock.acquire()

    @of_package
    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.kicks and threading.current_thread() is threading.main_thread():
            self.kicks.pop()()


def test_a_handler_runs_once_if_a_kick_arrives_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = KickedAtRelease()
    monkeypatch.setattr(interrupts, "_lock", lock)
    assert interrupts_of(changes_in_steps) == 1
    assert not lock.kicks


class AddedBetween(dict[int, Any]):
    """The deferrals; the main thread adds one between the two looks of the kicking thread."""

    def __init__(self, add: Callable[[], None]) -> None:
        self.looks: Iterator[Callable[[], None] | None] = iter((None, add))

    def __bool__(self) -> bool:
        add = next(self.looks, lambda: None)
        if add is not None:
            add()
        return add is not None


def test_one_thread_at_most_sends_kicks(monkeypatch: pytest.MonkeyPatch) -> None:
    kicks, begun = interrupts._Kicks(), list[Callable[[], object]]()
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, args: begun.append(lambda: run(*args)))
    monkeypatch.setattr(interrupts, "_deferred", AddedBetween(kicks.begin))

    def goes_on(run: Callable[[], object]) -> bool:
        sleeps = iter(range(2))
        monkeypatch.setattr(interrupts, "sleep", lambda _: next(sleeps))
        try:
            run()
        except StopIteration:  # it sleeps a third time
            return True
        return False

    kicks.begin()
    assert [goes_on(run) for run in begun] == [True, False]


@of_package
def runs_on(count: int) -> None:
    _thread.interrupt_main()
    for _ in range(count):
        len(steps)


def test_a_handler_runs_after_a_limit_in_endless_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "LONGEST", 0.01)
    monkeypatch.setattr(interrupts, "MOST", 100)
    assert interrupts_of(runs_on, 10_000_000) == 1


# Programs see their own handlers


def test_programs_see_their_own_handlers() -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        pass

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.signal(signal.SIGUSR1, handler) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert isinstance(interrupts._real_getsignal(signal.SIGUSR1), interrupts._Handler)
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is handler
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert interrupts._real_getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_handlers_that_only_wake_a_loop_are_left_alone() -> None:
    from asyncio.unix_events import _sighandler_noop  # type: ignore[attr-defined]

    signal.signal(signal.SIGUSR1, _sighandler_noop)
    assert interrupts._real_getsignal(signal.SIGUSR1) is _sighandler_noop
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_wrong_uses_of_signal_fail_as_usual() -> None:
    with pytest.raises(TypeError):
        signal.signal(signal.SIGINT, "no handler")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="signal number out of range"):
        signal.signal(10_000, signal.SIG_DFL)
    with pytest.raises(OSError, match="Invalid argument"):
        signal.signal(signal.SIGKILL, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_forked_child_is_interrupted_like_its_parent() -> None:
    child = os.fork()
    if not child:
        try:
            changes_in_steps()
            len(steps)
        except KeyboardInterrupt:
            os._exit(7 if steps == ["0", "1", "2"] else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
