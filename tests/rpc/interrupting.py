"""Interrupt calls at chosen points, and check the state after each; for the main thread of a process in a group.

A point is a place where CPython checks for signals: the entry of a function, a backward jump, a call. `Injection`
counts them by a trace function, and marks SIGINT pending at the n-th, as the arrival of the signal does. CPython
itself calls the handler at the next place where it checks, so no impossible point is tried. The mark is set by an
object that dies as the trace function ends: set any earlier, the handler would run within that function.
"""

import _thread
import asyncio
import contextlib
import dis
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import torch

import telegrad.autograd as autograd
import telegrad.rpc as rpc
import telegrad.weights as weights
from telegrad._core.worker import current
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef
from tests.cluster import in_background, wait_until
from tests.rpc.members import Counter

LIMIT = 10.0  # seconds that anything may take afterwards, on a busy machine
A, B = "worker1", "worker2"

# asyncio.run raises KeyboardInterrupt when SIGINT has cancelled its task, except for an instant at its beginning.
INTERRUPTED = (KeyboardInterrupt, asyncio.CancelledError)

_LOOKS = {
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME", "POP_JUMP_BACKWARD"))
}


class _Arrival:
    """An object at whose death SIGINT arrives."""

    __del__ = staticmethod(_thread.interrupt_main)


class Injection:
    """Have SIGINT arrive at certain points, counted from 0."""

    def __init__(self, *at: int) -> None:
        self.at, self.seen = set(at), 0
        self.where: list[str] = []

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        module = frame.f_globals.get("__name__") or ""
        if event == "call" and module.partition(".")[0] not in ("telegrad", "tests"):
            caller = frame.f_back
            if caller is None or caller.f_trace is None or module.startswith("asyncio"):
                return None  # it is not called by this package
        if module == "telegrad._core.interrupts":
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in _LOOKS:
            return self.trace
        if event in ("call", "opcode"):
            self.seen += 1
            if self.seen - 1 in self.at:
                self.at.discard(self.seen - 1)
                self.where.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
                if not self.at:
                    sys.settrace(None)
                arrival = _Arrival()  # noqa: F841
        return self.trace


# A handler that runs in the trace function sees a frame of the package, and so waits for a frame that is traced.
Injection.trace = FunctionType(Injection.trace.__code__, {**globals(), "__name__": "telegrad.traced"})


def settle() -> None:
    """Wait until deferred handlers have run, which in traced functions happens up to 5 ms later."""
    waiting: Any = getattr(sys.modules.get("telegrad._core.interrupts"), "_deferred", ())
    wait_until(lambda: not waiting)


def interrupted(act: Callable[[], object], injection: Injection) -> bool:
    """Run `act`; return whether it was interrupted."""
    try:
        try:
            sys.settrace(injection.trace)
            act()
            sys.settrace(None)
            settle()
        except INTERRUPTED:
            sys.settrace(None)
            settle()
            return True
    except INTERRUPTED:  # the second interrupt
        return True
    finally:
        sys.settrace(None)
    return False


# Functions that the other workers run


def double(value: Any) -> Any:
    return value + value


def numbers() -> Any:
    yield from (1, 2, 3)


class Picky:
    """A value that runs code of the user when it is pickled and when it is unpickled."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __add__(self, other: "Picky") -> "Picky":
        return Picky(self.value + other.value)

    def __getstate__(self) -> int:
        return sum(each for each in range(self.value, self.value + 1))

    def __setstate__(self, value: int) -> None:
        self.value = sum(each for each in range(value, value + 1))


def books() -> dict[str, int]:
    """Return the numbers of references and contexts that a worker keeps."""
    gc.collect()
    return {**rpc.debug_info(), "contexts": len(current.here().conductor.contexts._contexts)}


# Calls that are interrupted


def call() -> None:
    assert rpc.rpc_sync(A, double, (2,), timeout=LIMIT) == 4


def call_with_tensors() -> None:
    assert rpc.rpc_sync(A, double, (torch.ones(5000),), timeout=LIMIT)[0] == 2


def call_with_much() -> None:
    assert rpc.rpc_sync(A, double, (torch.ones(1_000_000),), timeout=LIMIT)[0] == 2


def call_with_own_pickling() -> None:
    assert rpc.rpc_sync(A, double, (Picky(2),), timeout=LIMIT).value == 4


def local_reference() -> None:
    assert rpc.rpc_sync(A, take_reference, (RRef(torch.ones(3)),), timeout=LIMIT) == 3


def group_call() -> None:
    assert rpc.group([A, B]).rpc_sync(double, (2,)) == [4, 4]


def calls_at_once() -> None:
    futures = [rpc.rpc_async(to, double, (2,), timeout=LIMIT) for to in (A, B, A, B)]
    assert [future.wait() for future in futures] == [4] * 4


def callbacks() -> None:
    future = rpc.rpc_async(A, double, (2,), timeout=LIMIT)
    told: list[int] = []
    future.add_done_callback(lambda done: told.append(done.value()))
    assert future.then(lambda done: double(done.value())).wait() == 8
    assert future.wait() == 4


def in_a_loop() -> None:
    async def ask() -> int:
        return sum([await rpc.rpc_async(to, double, (2,), timeout=LIMIT) for to in (A, B)])

    assert asyncio.run(ask()) == 8


def cancelled() -> None:
    future = rpc.rpc_async(A, time.sleep, (0.001,), timeout=LIMIT)
    future.cancel()
    with contextlib.suppress(Exception):
        future.wait()


def stream() -> None:
    with rpc.rpc_stream(A, numbers, timeout=LIMIT) as items:
        assert (next(items), next(items)) == (1, 2)
    assert list(rpc.rpc_stream(A, numbers, timeout=LIMIT)) == [1, 2, 3]


def reference() -> None:
    rref = rpc.remote(A, double, (torch.ones(3),), timeout=LIMIT)
    assert rref.to_here(timeout=LIMIT)[0] == 2
    assert rpc.rpc_sync(B, take_reference, (rref,), timeout=LIMIT) == 6


def take_reference(rref: Any) -> float:
    return float(rref.to_here(timeout=LIMIT).sum())


def actor() -> None:
    counter = rpc.remote(A, Counter, timeout=LIMIT)
    assert (counter.rpc_sync(timeout=LIMIT).add(2), counter.rpc_async(timeout=LIMIT).add(2).wait()) == (2, 4)


def backward() -> None:
    with autograd.context() as context_id:
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda gradient: double(gradient) / 2)  # code of the user, within
        there = rpc.rpc_sync(A, torch.mul, (weight, 3), timeout=LIMIT)
        autograd.backward(context_id, [rpc.rpc_sync(B, double, (there,), timeout=LIMIT).sum()])
        assert autograd.get_gradients(context_id)[weight][0] == 6


class Trained:
    """A module and an optimizer on another worker, and published weights."""

    def __init__(self) -> None:
        self.module = RemoteModule(A, torch.nn.Linear, (3, 1))
        self.optimizer = DistributedOptimizer(torch.optim.SGD, self.module.remote_parameters(), lr=0.01)
        self.name = f"weights{next(_numbers)}"
        self.publisher = weights.Publisher(self.name, {"x": torch.ones(3)})


_numbers = itertools.count()
_trained: list[Trained] = []


def step() -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [_trained[0].module(torch.ones(2, 3)).sum()])
        _trained[0].optimizer.step(context_id)


def fused_step() -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [_trained[0].module(torch.ones(2, 3)).sum()], step=_trained[0].optimizer)


def module_made() -> None:
    module = RemoteModule(A, torch.nn.Linear, (3, 1))
    assert (module(torch.ones(2, 3)).shape, len(module.remote_parameters())) == ((2, 1), 2)


def published() -> None:
    trained = _trained[0]
    number = trained.publisher.publish()
    assert rpc.rpc_sync(A, read_version, ("worker0", trained.name, number), timeout=LIMIT) >= number


_subscribers: dict[str, weights.Subscriber] = {}


def read_version(publisher: str, name: str, number: int) -> int:
    if name not in _subscribers:
        _subscribers[name] = weights.Subscriber(publisher, name)
    return int(_subscribers[name].at_least(number).number)


ACTS: list[Callable[[], None]] = [
    *(call, call_with_tensors, call_with_much, call_with_own_pickling, calls_at_once, callbacks, in_a_loop, cancelled),
    *(stream, reference, actor, local_reference, group_call, backward, step, fused_step, module_made, published),
]
SCENES = {act.__name__: act for act in ACTS}


# Conditions after an interrupt


def standing() -> dict[str, Any]:
    """Return what this worker holds, once no call is in flight."""
    gc.collect()
    agent = current.here().agent
    peers: list[Any] = [*agent._connections._peers.values()]
    open_files = [file for each in os.listdir("/proc/self/fd") if (file := link_of(each))]
    blocks = sum("memfd:" in file for file in open_files)
    return {
        "descriptors": len(open_files) - blocks,
        "blocks": blocks,
        "threads": sum(not thread.name.startswith("telegrad-worker") for thread in threading.enumerate()),
        "calls": [under_way(peer) for peer in peers],
        "slots": agent._reactor._scheduler.busy,
        "lent": sum(len(link._outgoing._lent) for peer in peers if hasattr(link := peer.link, "_outgoing")),
        "here": books(),
        A: rpc.rpc_sync(A, books, timeout=LIMIT),
        B: rpc.rpc_sync(B, books, timeout=LIMIT),
    }


def link_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed meanwhile, such as that of the listing
        return ""


def under_way(peer: Any) -> tuple[int, int, int]:
    with peer.lock:
        return len(peer.calls.in_flight), len(peer.connection._queue), peer.calls.weight


def check_calls() -> None:
    """Check that the next call to each worker works."""
    for to in (A, B):
        began = time.monotonic()
        assert rpc.rpc_sync(to, double, (3,), timeout=LIMIT) == 6
        assert time.monotonic() - began < LIMIT


def prepare() -> dict[str, Any]:
    """Run each scene twice, so that lazily made objects exist; return what this worker holds then."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _trained[:] = [Trained()]
    for _ in range(2):
        for act in SCENES.values():
            act()
    until = time.monotonic() + LIMIT
    while is_under_way(now := standing()):
        assert time.monotonic() < until, now
    return now


def is_under_way(now: dict[str, Any]) -> bool:
    """Return True if messages are pending, or a worker does not know yet that a context has ended."""
    passing = ("pending", "contexts")
    return any(count for to in ("here", A, B) for name, count in now[to].items() if name.startswith(passing))


def holds_no_more(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return True if no more is held than before, except blocks that calls which were given up use for a while."""
    is_more = now["descriptors"] > before["descriptors"] or now["blocks"] > before["blocks"] + 8
    others = now.keys() - {"descriptors", "blocks"}
    return not is_more and all(now[name] == before[name] for name in others)


def check_standing(before: dict[str, Any]) -> None:
    try:
        wait_until(lambda: holds_no_more(standing(), before), LIMIT)
    except AssertionError as error:
        raise AssertionError(f"\nbefore {before}\nnow    {standing()}") from error


def points(act: Callable[[], None]) -> int:
    counting = Injection()
    counting.at = {-1}
    assert not interrupted(act, counting)
    return counting.seen


def signals_at_random(seed: int, count: int) -> int:
    """Interrupt calls by a timer's signal; return how often."""
    before, chooser = prepare(), random.Random(seed)
    acts = [*SCENES.values(), sleep_there]
    acts.remove(in_a_loop)  # an interrupt may leave the loop of asyncio.run open
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    done = 0
    while done < count:
        act = chooser.choice(acts)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(1e-4, 6e-3))
                while True:
                    act()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                settle()
        except KeyboardInterrupt:
            done += 1
        try:
            check_calls()
        except BaseException as error:
            raise AssertionError(f"SEED={seed}, after {done} interrupts, in {act.__name__}") from error
    check_standing(before)
    return done


def sleep_there() -> None:
    rpc.rpc_sync(A, time.sleep, (0.02,), timeout=LIMIT)


class Stop(BaseException):
    """An exception that a handler raises to end the program."""


class Alarm(Exception):
    """An ordinary error that a handler raises."""


def other_handlers(seed: int, count: int) -> int:
    """Check that the exception of a handler is raised once, as the same object; return how often."""
    before, chooser = prepare(), random.Random(seed)
    made: list[BaseException] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        made.append(chooser.choice((Stop, Alarm))())
        raise made[-1]

    known = {act: points(act) for act in SCENES.values() if act is not in_a_loop}  # asyncio replaces the exception
    signal.signal(signal.SIGINT, stop)
    done = 0
    for act, most in known.items():
        for point in chooser.sample(range(most), count):
            injection, came = Injection(point), None
            made.clear()
            try:
                interrupted(act, injection)
            except (Stop, Alarm) as error:
                came = error
            # Calls that wait shorter have fewer points.
            about = f"SEED={seed} {act.__name__}, point {point}: {injection.where}"
            assert [came] == made if injection.where else came is None, about
            done += came is not None
            check_calls()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_standing(before)
    return done


def blocked(value: Any = None) -> Any:
    """Interrupt the main thread, which runs this code of the user, or waits while another thread runs it."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGALRM)
    assert _came.wait(LIMIT), "what the handler has raised did not come"


_came = threading.Event()  # the exception of a handler has reached the caller


class Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        blocked()


class BlockedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        blocked()


class BlockedPickle:
    def __reduce__(self) -> Any:
        return blocked()


def over_there(weight: torch.Tensor) -> torch.Tensor:
    """Return the result of another worker, so that the pass has a part there."""
    return rpc.rpc_sync(A, double, (weight,), timeout=LIMIT)


def in_a_step(weight: torch.Tensor, context_id: int) -> None:
    optimizer = DistributedOptimizer(BlockedSGD, [RRef(weight)], lr=0.1)
    autograd.backward(context_id, [(over_there(weight) + weight).sum()], step=optimizer)


def in_a_hook(weight: torch.Tensor, context_id: int) -> None:
    there = over_there(weight) * 2
    there.register_hook(blocked)
    autograd.backward(context_id, [there.sum()])


def in_a_hook_of_a_leaf(weight: torch.Tensor, context_id: int) -> None:
    weight.register_post_accumulate_grad_hook(blocked)
    autograd.backward(context_id, [(over_there(weight) + weight).sum()])


def ended_call() -> rpc.Future[Any]:
    future = rpc.rpc_async(A, double, (2,), timeout=LIMIT)
    future.wait()
    return future


def in_a_callback_of_what_is_cancelled(weight: torch.Tensor, context_id: int) -> None:
    future = rpc.rpc_async(A, time.sleep, (HELD,), timeout=LIMIT)
    future.add_done_callback(blocked)
    future.cancel()
    _came.wait(LIMIT)  # another thread may run the callback: then this wait is interrupted


OWN_CODE: dict[str, Callable[[torch.Tensor, int], object]] = {
    "then": lambda *_: ended_call().then(blocked),
    "a callback": lambda *_: ended_call().add_done_callback(blocked),
    "a callback of what is cancelled": in_a_callback_of_what_is_cancelled,
    "a backward function": lambda w, context_id: autograd.backward(context_id, [Blocked.apply(over_there(w)).sum()]),
    "behind the other": lambda w, context_id: autograd.backward(context_id, [over_there(Blocked.apply(w)).sum()]),
    "without others": lambda w, context_id: autograd.backward(context_id, [Blocked.apply(w).sum()]),
    "a hook": in_a_hook,
    "a hook of a leaf": in_a_hook_of_a_leaf,
    "a step": in_a_step,
    "grad": lambda w, context_id: autograd.grad(context_id, over_there(Blocked.apply(w)).sum(), [w]),
    "pickling": lambda *_: rpc.rpc_sync(A, double, (BlockedPickle(),), timeout=LIMIT),
    "pickling for several": lambda *_: rpc.group([A, B]).rpc_sync(double, (BlockedPickle(),)),
    "pickling for a map": lambda *_: rpc.group([A, B]).map(double, [1, BlockedPickle(), *range(1000)]).wait(),
}


def in_own_code(one_in: int) -> int:
    """Check that a call raises what a handler raises within its code of the user, as the same object.

    Each code gets one in so many kinds of exceptions. Behind another worker, that code may run on a thread that is not
    interrupted. Return how often it was raised.
    """
    rpc.rpc_sync(rpc.get_worker_info().name, double, (1,))  # as an optimizer with parameters here does
    before, done = prepare(), 0
    for number, (name, act) in enumerate(OWN_CODE.items()):
        for error in (KeyboardInterrupt(), SystemExit(7), Stop(), Alarm())[number % one_in :: one_in]:

            def stop(signum: int, frame: FrameType | None, error: BaseException = error) -> None:
                raise error

            signal.signal(signal.SIGALRM, stop)
            came: BaseException | None = None
            with autograd.context() as context_id:
                try:
                    act(torch.ones(3, requires_grad=True), context_id)
                    settle()
                except BaseException as raised:
                    came = raised
            assert came is error, f"in {name}: {came!r} came in place of {error!r}"
            done += 1
            del error, came
            _came.set()
            check_calls()
            _came.clear()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    check_standing(before)
    return done


def beside_another_thread(seed: int) -> int:
    """Check that calls of another thread over the same connection go on; return how many."""
    prepare()
    chooser, known = random.Random(seed), points(call_with_tensors)
    over = False
    wrong: list[BaseException] = []
    count = 0

    def ask() -> None:
        nonlocal count
        try:
            while not over:
                assert rpc.rpc_sync(A, double, (5,), timeout=LIMIT) == 10
                count += 1
        except BaseException as error:
            wrong.append(error)

    with in_background(ask):
        for point in chooser.sample(range(known), 25):
            interrupted(call_with_tensors, Injection(point))
            interrupted(sleep_there, Injection(point))
        over = True
    assert not wrong, wrong
    check_calls()
    return count


def late_numbers() -> Any:
    time.sleep(HELD)
    yield 1


class Late(Blocked):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(HELD)
        return gradients[0] * 2


def held_backward() -> None:
    with autograd.context() as context_id:
        weight = torch.ones(3, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(A, Late.apply, (weight,), timeout=LIMIT).sum()])
        assert autograd.get_gradients(context_id)[weight][0] == 2


AT_RANDOM = 100  # handlers that run at random places
HELD = 0.03  # seconds for which an interrupted call waits
WAITS: tuple[tuple[Callable[[], object], object], ...] = (  # with their values
    (lambda: rpc.rpc_sync(A, time.sleep, (HELD,), timeout=LIMIT), None),
    (lambda: rpc.rpc_async(A, time.sleep, (HELD,), timeout=LIMIT).wait(), None),
    (lambda: rpc.remote(A, time.sleep, (HELD,), timeout=LIMIT).to_here(timeout=LIMIT), None),
    (lambda: rpc.group([A, B]).rpc_sync(time.sleep, (HELD,)), [None, None]),
    (lambda: list(rpc.rpc_stream(A, late_numbers, timeout=LIMIT)), [1]),
    (held_backward, None),
)


def calls_in_handlers(seed: int, one_in: int) -> None:
    """Make calls in a handler that interrupts a wait, one in so many pairs of a call and a wait; check both results."""
    before = prepare()
    handled: list[str] = []
    wanted: list[Callable[[], None]] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        wanted[0]()
        handled.append(wanted[0].__name__)

    signal.signal(signal.SIGALRM, handle)
    for (first, (wait, value)), (second, act) in itertools.product(enumerate(WAITS), enumerate(SCENES.values())):
        # asyncio has one loop per thread, and a thread is in one context at a time, or it raises at once.
        is_impossible = act is in_a_loop or (wait is held_backward and act in (backward, step, fused_step))
        if is_impossible or (first + second) % one_in:
            continue
        wanted[:] = [act]
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, HELD / 3)
        assert wait() == value
        while handled[-1:] != [act.__name__]:
            assert time.monotonic() < began + LIMIT, (first, act)
        assert time.monotonic() < began + LIMIT, f"{act.__name__} in a handler hung within the wait {first}"
    # At random places of short calls: one signal at a time, since on a busy machine a handler takes longer than a timer
    chooser, count = random.Random(seed), len(handled)
    wanted[:] = [call]
    until = time.monotonic() + LIMIT
    while len(handled) < count + AT_RANDOM:
        assert time.monotonic() < until, len(handled) - count
        if not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, chooser.uniform(1e-4, 2e-3))
        chooser.choice((call, call_with_tensors, calls_at_once, backward))()
    signal.setitimer(signal.ITIMER_REAL, 0)
    settle()
    check_standing(before)


_meetings: Iterator[str]  # paths of files that do not exist


def live() -> None:
    """Join a group of one worker, make a call, and leave it."""
    options = rpc.TelegradOptions(init_method=f"file://{next(_meetings)}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.rpc_sync("alone", double, (2,)) == 4
    finally:
        rpc.shutdown()


def lives(seed: int, count: int) -> int:
    """Interrupt `init_rpc` and `shutdown`; each time the process is in no group afterwards, and can join the next."""
    with tempfile.TemporaryDirectory() as folder:
        global _meetings
        _meetings = (f"{folder}/{number}" for number in itertools.count())
        return _lives(seed, count)


def _lives(seed: int, count: int) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chooser = random.Random(seed)
    for _ in range(2):
        live()
    known = points(live)
    wait_until(lambda: not remains()[1])
    before = remains()
    for _ in range(count):
        point = chooser.randrange(known)
        injection = Injection(point, point + chooser.choice((0, chooser.randrange(1, 200))))
        with contextlib.suppress(Exception):  # of shutdown after an interrupted init_rpc
            interrupted(live, injection)
        sys.settrace(None)
        began = time.monotonic()
        if current.worker is not None:  # it was interrupted as it left `init_rpc`
            rpc.shutdown()
        live()
        assert time.monotonic() - began < LIMIT, (seed, point, injection.where)
        try:
            wait_until(lambda: remains() == before, LIMIT)
        except AssertionError as error:
            raise AssertionError(f"SEED={seed} {point} {injection.where}\nbefore {before}\nnow {remains()}") from error
    return known


def remains() -> tuple[int, list[str]]:
    gc.collect()
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("telegrad"))
    return len(os.listdir("/proc/self/fd")), names


def sweep(names: list[str], count: int, seed: int) -> int:
    """Interrupt `count` times, or at each point once if 0; at half of them, once more soon after. Return how often."""
    before, chooser = prepare(), random.Random(seed)
    done = 0
    for name in names:
        act = SCENES[name]
        known = points(act)
        chosen = range(known) if not count else chooser.sample(range(known), min(known, count // len(names)))
        for point in chosen:
            again = chooser.choice((0, chooser.randrange(1, 200)))
            if act is in_a_loop:  # a second interrupt breaks the loop of asyncio
                again = 0
            injection = Injection(point, point + again)
            try:
                came = interrupted(act, injection)
                assert came or not injection.where or act is in_a_loop, "it was lost"  # asyncio may have ended before
                check_calls()
                done += 1
            except BaseException as error:
                raise AssertionError(f"SEED={seed} {name}, points {point}, +{again}: {injection.where}") from error
        try:
            check_standing(before)
        except AssertionError as error:
            raise AssertionError(f"SEED={seed} {name}: {error}") from error
    return done
