"""The program of each worker: it calls the others, owns a claim while it may, writes numbers, and records all acts."""

import contextlib
import threading
import time
from collections.abc import Callable

import torch

import telegrad.rpc as rpc
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.stores.directory import ABSENT, DirectoryLost, Entry, LeaseLost
from telegrad._core.worker import current
from telegrad.errors import TelegradError
from tests import hosts
from tests.partitions import record
from tests.partitions.record import Final, Recorder

CALLS, ACTS, CLAIMS, WRITES, LOOKS = 0.1, 0.05, 0.5, 0.5, 0.5  # seconds between two of each
CALL_TIMEOUT = 5.0
ENDS = 15.0  # seconds for a thread to end: an operation of the directory may take ten
CLAIM, NUMBERS = "test/claim", "test/number/"

_group: DynamicGroup
_name = ""
_recorder: Recorder | None = None
_over = threading.Event()
_threads: list[threading.Thread] = []


def enter(namespace: str) -> None:
    """Move this process, and all processes that it starts, to a host."""
    torch.set_num_threads(1)
    hosts.enter(namespace)


def join(number: int, url: str, address: str, silence: float) -> None:
    """Join the group, or join it again if this worker was declared lost."""
    global _group, _name
    if current.worker is not None:
        return
    _name = f"worker{number}"
    options = rpc.TelegradOptions(init_method=url, address=address, silence=silence, rpc_timeout=CALL_TIMEOUT)
    rpc.init_rpc(_name, rank=number, rpc_backend_options=options)
    assert current.worker is not None
    assert isinstance(current.worker.directory, DynamicGroup)
    _group = current.worker.directory
    rpc.on_join(lambda worker: _add(record.JOINED, other=worker.name))
    rpc.on_leave(lambda worker, how: _add(record.LEFT, other=worker.name, outcome=how))
    rpc.on_lost(lambda worker, error: _add(record.LOST, other=worker.name, outcome=str(error)))


def wait_for_all(count: int) -> None:
    rpc.wait_for_workers(count, timeout=30)


def start(path: str, others: list[str]) -> None:
    """Begin to act, and to record."""
    global _recorder
    _over.clear()
    _recorder = Recorder(path, _name)
    loops: list[tuple[float, Callable[[], None]]] = [
        *((CALLS, _caller(other)) for other in others),
        (ACTS, _Owner().act),
        (WRITES, _Writer().act),
        (LOOKS, _look),
        (record.TICK, _Ticker().act),
    ]
    _threads[:] = [threading.Thread(target=_repeat, args=loop, daemon=True) for loop in loops]
    for thread in _threads:
        thread.start()


def finish() -> None:
    """Stop acting and recording."""
    global _recorder
    _over.set()
    for thread in _threads:
        thread.join(ENDS)
        assert not thread.is_alive(), f"{thread} hangs"
    if _recorder is not None:
        _recorder.close()
        _recorder = None


def final() -> Final:
    """Return the content of the directory."""
    at = time.monotonic()
    entries = {entry.key: entry for entry in _group.directory.list("").entries}
    numbers = {key.removeprefix(NUMBERS): int(each.value) for key, each in entries.items() if key.startswith(NUMBERS)}
    members = frozenset(each.member.name for each in _group.registry.roster().members.values())
    return Final(at, members, numbers, entries[CLAIM].created if CLAIM in entries else 0)


def is_lost() -> bool:
    return bool(_group.over)


def server_pid() -> int:
    """Return the process id of the directory that this worker has started."""
    assert _group._keeping is not None
    return _group._keeping._keeper.pid


def answer(caller: str) -> str:
    """Serve a call."""
    _add(record.SERVED, other=caller)
    return _name


def shut_down() -> None:
    with contextlib.suppress(TelegradError):
        rpc.shutdown(graceful=False)


def _add(act: str, **fields: object) -> None:
    recorder = _recorder
    if recorder is not None:
        recorder.add(time.monotonic(), act, **fields)


def _repeat(period: float, act: Callable[[], None]) -> None:
    while not _over.is_set():
        due = time.monotonic() + period
        with contextlib.suppress(DirectoryLost, LeaseLost):
            act()
        _over.wait(max(0.0, due - time.monotonic()))


def _caller(other: str) -> Callable[[], None]:
    def call() -> None:
        began, outcome = time.monotonic(), ""
        try:
            assert rpc.rpc_sync(other, answer, (_name,), timeout=CALL_TIMEOUT) == other
        except TelegradError as error:
            outcome = type(error).__name__
        _add(record.CALLED, began=began, other=other, outcome=outcome)

    return call


def _look() -> None:
    began = time.monotonic()
    with contextlib.suppress(TelegradError):
        seen = [worker.name for worker in rpc.workers()]
        if not _group.over:
            _add(record.SAW, began=began, seen=seen)


class _Ticker:
    """Record that this process runs, and that it learned of its own loss."""

    def __init__(self) -> None:
        self._is_told = False

    def act(self) -> None:
        _add(record.RAN)
        if _group.over and not self._is_told:
            self._is_told = True
            _add(record.TOLD, outcome=_group.over)


class _Owner:
    """Own the claim while possible: a key under the worker's lease, whose creation is the fencing token."""

    def __init__(self) -> None:
        self._token = 0
        self._due = 0.0  # time of the next claim

    def act(self) -> None:
        now = time.monotonic()
        if _group.holds and self._token:
            assert _recorder is not None
            _recorder.add(now, record.OWNED, token=self._token)
        elif _group.holds and now >= self._due:
            self._due = now + CLAIMS
            self._token = self._claim()

    def _claim(self) -> int:
        assert current.worker is not None
        mine = current.worker.me.incarnation.encode()
        entry = _group.directory.swap(CLAIM, mine, ABSENT, _group._lease).entry
        return entry.created if entry is not None and entry.value == mine else 0


class _Writer:
    """Write rising numbers to a key that only this worker writes."""

    def __init__(self) -> None:
        self._found: Entry | None = None
        self._is_read = False
        self._number = 0

    def act(self) -> None:
        key = NUMBERS + _name
        if not self._is_read:
            self._found = next(iter(_group.directory.list(key).entries), None)
            self._number = int(self._found.value) if self._found is not None else 0
            self._is_read = True
            _add(record.WROTE, token=self._number, outcome=record.DONE)
        self._number += 1
        expected = self._found.revision if self._found is not None else ABSENT
        try:
            done, self._found = _group.directory.swap(key, str(self._number).encode(), expected)
        except DirectoryLost:
            _add(record.WROTE, token=self._number, outcome=record.UNKNOWN)
            raise
        seen = [] if done else [self._found.value.decode() if self._found is not None else "0"]
        _add(record.WROTE, token=self._number, outcome=record.DONE if done else record.REFUSED, seen=seen)
