"""A worker without memory for received data says so, and loses only the call."""

import resource
import sys
from collections.abc import Callable, Iterator
from errno import ENOMEM
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from telegrad import errors, rpc
from telegrad._core import processes
from telegrad._core.pickling.pickling import decode, encode
from telegrad.rpc import TelegradOptions
from tests.cluster import Process, group, init

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is told by /proc")
MB = 1 << 20
LEFT = 250 * MB
SIZE = 300 * MB
SAID = f"has no memory for {SIZE:,} bytes that worker"


def limit(left: int) -> None:
    """Allow this process to grow by `left` bytes."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + left, resource.RLIM_INFINITY))


def unlimit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    with group(2, transport=request.param) as made:
        yield made


waits: list[torch.futures.Future[int]] = []


@rpc.functions.async_execution
def wait_for_end() -> torch.futures.Future[int]:
    waits.append(torch.futures.Future())
    return waits[-1]


def end() -> None:
    waits.pop().set_result(7)


MADE = {"size": lambda: SIZE // 4, "tensor": lambda: torch.zeros(SIZE // 4), "bytes": lambda: bytes(SIZE)}


def errors_of(function: Callable[..., Any], kinds: tuple[str, ...], limited: str) -> list[str]:
    said = []
    other = rpc.rpc_async("worker1", wait_for_end)
    for kind in kinds:
        with pytest.raises(errors.CannotDecode) as caught:
            rpc.rpc_sync("worker1", function, (MADE[kind](),))
        said.append(str(caught.value))
    rpc.rpc_sync("worker1", end)
    assert other.wait() == 7
    rpc.rpc_sync(limited, unlimit)
    assert rpc.rpc_sync("worker1", function, (MADE[kinds[0]](),)) is not None
    return said


@pytest.mark.parametrize(
    ("two", "limited"),
    [
        *(("unix", 0), ("tcp", 1)),
        *(pytest.param("unix", 1, marks=pytest.mark.nightly), pytest.param("tcp", 0, marks=pytest.mark.nightly)),
    ],
    indirect=["two"],
)
def test_a_worker_without_memory_for_values_fails_only_their_calls(two: list[Process], limited: int) -> None:
    two[limited].run(limit, LEFT)
    function, kinds = [(torch.ones, ("size", "size")), (len, ("tensor", "bytes"))][limited]
    said = two[0].run(errors_of, function, kinds, f"worker{limited}")
    assert all(text.startswith(f"worker 'worker{limited}' {SAID} 'worker{1 - limited}' sent") for text in said)


@pytest.mark.parametrize(
    "error",
    [ValueError("[digital envelope routines] malloc failure"), MemoryError(), RuntimeError("can't start new thread")],
)
def test_joining_without_memory_says_so(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("telegrad._core.rpc.cluster.start", Mock(side_effect=error))
    with pytest.raises(errors.RendezvousError, match="could not join: this process has no memory left"):
        init(0, 1, 1)


class Large:
    def __reduce__(self) -> tuple[object, ...]:
        return allocate, ()


def allocate() -> None:
    raise MemoryError


def test_the_error_for_missing_memory_does_not_mention_versions() -> None:
    with pytest.raises(errors.CannotDecode, match="has no memory left") as caught:
        decode(encode(Large(), True).body, ())
    assert "versions" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"),
        ValueError("[digital envelope routines] malloc failure"),
    ],
)
def test_errors_of_missing_memory_are_recognized(error: Exception) -> None:
    assert processes.out_of_memory(error)
    said = "^w1 was not called: this process has no memory left"
    with (
        pytest.raises(errors.PeerUnreachable, match=said),
        processes.translate_error("w1 was not called", errors.PeerUnreachable),
    ):
        raise error


@pytest.mark.parametrize("error", [OSError(1, "no"), RuntimeError("no"), errors.LimitReached("out of memory")])
def test_other_errors_are_not_errors_of_missing_memory(error: Exception) -> None:
    assert not processes.out_of_memory(error)


# The memory that a process may use, by files as in a container


MACHINE = 64 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(processes, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(processes, "_of_machine", lambda: MACHINE)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups_the_limit_is_the_memory_of_the_machine(groups: Path) -> None:
    assert processes.usable_memory() == MACHINE
    assert TelegradOptions().shared_memory == MACHINE // 2
    assert TelegradOptions(shared_memory=7).shared_memory == 7


def test_the_smallest_limit_of_all_parent_groups_counts(groups: Path) -> None:
    put(groups / "own", "0::/system/job\n")
    put(groups / "groups" / "system" / "job" / "memory.max", "max\n")
    assert processes.usable_memory() == MACHINE
    put(groups / "groups" / "system" / "memory.max", f"{8 << 30}\n")
    assert processes.usable_memory() == 8 << 30
    put(groups / "groups" / "memory.max", f"{6 << 30}\n")
    assert TelegradOptions().shared_memory == 3 << 30


def test_control_groups_of_version_1(groups: Path) -> None:
    put(groups / "own", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    put(groups / "groups" / "memory" / "job" / "memory.limit_in_bytes", "9223372036854771712\n")
    put(groups / "groups" / "memory" / "memory.limit_in_bytes", f"{2 << 30}\n")
    assert processes.usable_memory() == 2 << 30
    put(groups / "own", "what is this\n")
    assert processes.usable_memory() == MACHINE


def test_this_machine_has_memory() -> None:
    assert processes._of_machine() > 1 << 20
