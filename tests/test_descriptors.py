"""Programs that may open few files get errors that say this, with advice."""

import errno
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import telegrad
from telegrad import errors, rpc
from telegrad._core import processes as limits
from tests.cluster import PATIENCE, Process, free_port, init, processes, run_all, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted by /proc")


def limit(left: int) -> None:
    """Allow this process to open `left` more files."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = {int(name) for name in os.listdir(limits.FOLDER) if os.path.exists(f"{limits.FOLDER}/{name}")}
    free = (number for number in itertools.count() if number not in used)
    first_refused = next(itertools.islice(free, left, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_refused, most))


def unlimit() -> None:
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1024), most))


@pytest.fixture
def two() -> Iterator[list[Process]]:
    with processes(2) as made:
        yield made


def error_of_joining(left: int) -> str:
    limit(left)
    with pytest.raises(errors.RendezvousError) as caught:
        init(0, 1, free_port(), rpc_timeout=PATIENCE)
    unlimit()
    init(0, 1, free_port())  # the failed attempts left nothing behind
    rpc.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("left", [2, 6, 10, limits.TO_JOIN - 1])
def test_joining_with_few_descriptors_says_how_many_are_needed(two: list[Process], left: int) -> None:
    said = two[0].run(error_of_joining, left)
    assert "ulimit -n" in said
    assert f"needs {limits.TO_JOIN} descriptors" in said


def error_of_starting(left: int) -> str:
    limit(left)
    with pytest.raises(errors.RendezvousError) as caught:
        telegrad.local(3)
    unlimit()
    return str(caught.value)


def test_starting_workers_with_few_descriptors_gives_advice(two: list[Process]) -> None:
    assert "ulimit -n" in two[0].run(error_of_starting, 8)


def error_of_calling() -> str:
    limit(0)
    with pytest.raises(errors.PeerUnreachable) as caught:
        rpc.rpc_sync("worker1", pow, (2, 3))
    unlimit()
    assert rpc.rpc_sync("worker1", pow, (2, 3)) == 8
    return str(caught.value)


class Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        heard.append(record.getMessage())


heard: list[str] = []


def hear() -> None:
    logging.getLogger("telegrad").addHandler(Heard())
    limit(0)


def large() -> None:
    with pytest.raises(errors.PeerLost):
        rpc.rpc_sync("worker1", torch.numel, (torch.ones(1 << 20),))


def what_was_heard() -> list[str]:
    unlimit()
    wait_until(lambda: heard)
    return heard


def join_two(rank: int, port: int) -> None:
    init(rank, 2, port)


def test_calls_without_descriptors_give_advice_and_work_later(two: list[Process]) -> None:
    run_all(two, join_two, free_port())
    said = two[0].run(error_of_calling)
    assert "worker 'worker1' was not called" in said
    assert "ulimit -n" in said
    two[1].run(hear)
    two[0].run(large)
    assert "ulimit -n" in two[1].run(what_was_heard)[0]


OPERATIONS: dict[str, Callable[[], object]] = {
    "small": lambda: rpc.rpc_sync("worker1", pow, (2, 3)),
    "argument": lambda: rpc.rpc_sync("worker1", torch.numel, (torch.ones(1 << 20),)),
    "arguments": lambda: rpc.rpc_sync("worker1", len, ([torch.ones(1 << 17) for _ in range(70)],)),
    "result": lambda: rpc.rpc_sync("worker1", torch.ones, (1 << 20,)),
    "both": lambda: rpc.rpc_sync("worker1", torch.mul, (torch.ones(1 << 20), 2)),
    "bytes": lambda: rpc.rpc_sync("worker1", bytes, (1 << 24,)),
    "group": lambda: rpc.group(["worker0", "worker1"]).rpc_sync(torch.numel, (torch.ones(1 << 20),)),
}


def blames_of_calls_with_few_descriptors() -> list[str]:
    """Return the failures that do not mention that this process has too few descriptors."""
    wrong = []
    for left, (name, act) in itertools.product(range(6), OPERATIONS.items()):
        OPERATIONS["small"]()
        limit(left)
        try:
            act()
        except errors.TelegradError as error:
            texts = [str(each) for each in getattr(error, "errors", {}).values()] or [str(error)]
            wrong += [f"{name}, {left} left: {text}" for text in texts if "ulimit -n" not in text or "was lost" in text]
        except BaseException as error:
            wrong.append(f"{name}, {left} left: {error!r}")
        finally:
            unlimit()
        act()  # the operation works again
    return wrong


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_calls_of_a_worker_with_few_descriptors_blame_no_other_worker(two: list[Process]) -> None:
    run_all(two, join_two, free_port())
    assert two[0].run(blames_of_calls_with_few_descriptors, patience=2 * PATIENCE) == []


def test_other_errors_are_not_changed() -> None:
    error = PermissionError(errno.EACCES, "no")
    assert limits.error_text(error) == str(error)
    with pytest.raises(PermissionError) as caught, limits.translate_error("it", errors.RendezvousError):
        raise error
    assert caught.value is error
