"""Public functions and methods raise the documented error in a process that was forked from a worker."""

import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import telegrad
from telegrad import errors, insight, rpc
from tests import public
from tests.cluster import PATIENCE, processes
from tests.things import Things

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")

LIMIT = 5.0  # seconds for one use in the child
FINE = "fine"


class Hangs(BaseException):
    """A use takes too long."""


def late(*_: object) -> None:
    raise Hangs


def use(act: Callable[[], Any]) -> str:
    """Run a use; return FINE, or its fault."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        act()
    except (errors.TelegradError, StopIteration):
        return FINE
    except Hangs:
        return f"hangs for {LIMIT:g} s"
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return FINE


def in_child(run: Callable[[], Any]) -> Any:
    """Return the result of `run` in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGALRM, late)
            os.write(writer, pickle.dumps(run()))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return pickle.loads(said)


def later(seconds: float) -> int:
    return int(threading.Event().wait(seconds))


def count(upto: int) -> Iterator[int]:
    yield from range(upto)


def things(local: Any) -> Things:
    """Make instances as programs do."""
    made = Things(local)
    reference = made.reference
    waited = rpc.rpc_async("worker0", later, (60.0,))
    tracing = insight.tracing(os.devnull)
    tracing.__enter__()
    rpc.rpc_sync("worker0", int)
    made.right |= {
        **dict.fromkeys(("of", "on"), "worker0"),
        **dict.fromkeys(("which", "index"), 1),
        **dict.fromkeys(("tensor", "value"), torch.ones(1, requires_grad=True)),
        **dict.fromkeys(("shape", "offsets", "sizes", "host"), "numbers"),
        **dict.fromkeys(("param", "to_here", "result"), None),
        **dict.fromkeys(("token", "cookies"), ""),
        "function": repr,
        "seconds": 2.0,
        "requires_grad": True,
        "code": 0,
        "after": {},
        "hook": print,
        "items": [1],
        "other": rpc.group(),
    }
    made.instances |= {
        "telegrad.rpc.Future": waited,
        "telegrad.rpc.Future then": waited.then(lambda done: done.wait()),
        "telegrad.rpc.Future done": rpc.rpc_async("worker0", int).then(lambda done: done.wait()),
        "telegrad.rpc.GroupFuture": rpc.group(["worker0"]).rpc_async(later, (60.0,)),
        "telegrad.rpc.RRef of its own": rpc.RRef(5),
        "telegrad.rpc.RRef being made": rpc.remote("worker0", later, (60.0,)),
        "telegrad.rpc.Stream": rpc.rpc_stream("worker0", count, (10_000,)),
        "telegrad.rpc.WorkerInfo": rpc.get_worker_info("worker0"),
        "telegrad.rpc.BackendType": rpc.BackendType.TENSORPIPE,
        "telegrad.rpc.RpcBackendOptions": rpc.RpcBackendOptions(),
        "telegrad._core.rpc.rref.Proxy": reference.rpc_sync(),
        "telegrad._core.rpc.rref.Proxy async": reference.rpc_async(),
        "telegrad._core.rpc.rref.Proxy remote": reference.remote(),
        "telegrad._core.rpc.rref.Proxy stream": reference.rpc_stream(),
        "telegrad.autograd.context": made.context,
        "telegrad.insight.group()": insight.group(),
        "telegrad.insight.dashboard()": insight.dashboard(),
        "telegrad.insight.tracing": tracing,
    }
    tuples = ("telegrad.rpc.Generation", "telegrad.rpc.TlsFiles", "telegrad.weights.Box", "telegrad.weights.Shard")
    made.instances |= dict.fromkeys(tuples)
    return made


LEFT_OUT = {
    "telegrad.rpc.init_rpc",  # a forked child may join a group of its own; tested below
    "telegrad.local",  # the same
    "telegrad.process_group",  # makes a process group of torch from a group
}


def uses(made: Things) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every use of each public object."""
    for name, function in public.functions().items():
        if name not in LEFT_OUT:
            yield name, partial(call, function, made)
    for name, kind in public.classes().items():
        if name.rpartition(".")[2] in ("Publisher", "Subscriber", "RRef", "RemoteModule", "DistributedOptimizer"):
            yield name, partial(call, kind, made)
    for name, thing in made.instances.items():
        for member, value in public.members(type(thing)).items():
            if member in ("set_result", "set_exception", "aclose"):  # these end the object, or are the same as `close`
                continue
            yield f"{name}: {member}", partial(touch, thing, member, value, made)


def call(function: Any, made: Things) -> None:
    function(**made.arguments(function))


def touch(thing: Any, member: str, value: Any, made: Things) -> None:
    if member == "__exit__":
        thing.__exit__(None, None, None)
    elif isinstance(value, property):
        getattr(thing, member)
    elif member == "__call__" and type(thing).__name__ == "Proxy":
        thing.copy()
    elif member == "__await__":
        next(thing.__await__())
    else:
        bound = getattr(thing, member)
        named = {} if member.startswith("__") else made.arguments(bound)
        if "items" in inspect.signature(bound).parameters and "method" not in named:
            bound(int, [1])
        else:
            bound(**named)


def shows(thing: Any) -> bool:
    """Return True if the object has a text for logs."""
    with contextlib.suppress(Exception):
        return bool(repr(thing))
    return False


def refused(act: Callable[[], Any]) -> bool:
    with contextlib.suppress(errors.NotInitialized):
        act()
        return False
    return True


def in_need_of_the_worker(made: Things) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield uses that would find their answer in memory, perhaps under a lock that the parent held at the fork."""
    subscriber, publisher = made.subscriber, made.publisher
    yield "newest", subscriber.newest
    yield "at_least", lambda: subscriber.at_least(1)
    yield "behind", lambda: subscriber.behind
    yield "versions", lambda: publisher.versions
    yield "subscribers", lambda: publisher.subscribers


def everything_in_a_child() -> dict[str, str]:
    with telegrad.local(["worker0"]) as local:
        made = things(local)
        instances = made.instances
        missing = public.classes().keys() - instances.keys()
        assert not missing, f"give an instance of {missing} to this test"
        told = in_child(lambda: {name: outcome for name, act in uses(made) if (outcome := use(act)) != FINE})
        told |= in_child(lambda: {f"repr of {name}": "raises" for name, thing in instances.items() if not shows(thing)})
        told |= in_child(lambda: {name: "works" for name, act in in_need_of_the_worker(made) if not refused(act)})
        assert in_child(instances["telegrad.rpc.Future done"].wait) == 0, "a value that the process already has"
        assert rpc.rpc_sync("worker0", pow, (2, 3)) == 8, "the parent's calls suffer"
        assert made.reference.to_here() == [1, 2], "the child has dropped the parent's reference"
        rpc.shutdown(graceful=False)
    return told


@pytest.mark.timeout(2 * PATIENCE)
def test_every_use_in_a_forked_child_raises_or_gives_a_plain_value() -> None:
    with processes(1) as (process,):
        wrong = process.run(everything_in_a_child)
    assert not wrong, "\n".join(f"{name} {outcome}" for name, outcome in wrong.items())


# A program whose children end in every possible way.
PROGRAM = """
import gc, multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader, Dataset
import telegrad
from telegrad import autograd, errors, rpc, weights


class Sampled(Dataset):
    def __init__(self, reference):
        self.reference = reference

    def __len__(self):
        return 4

    def __getitem__(self, at):
        try:
            return self.reference.rpc_sync().count(at)
        except errors.NotInitialized:
            return 7


def joins(port):
    rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=rpc.TelegradOptions(init_method=port))
    assert rpc.rpc_sync("child", pow, (2, 3)) == 8
    rpc.shutdown()


if __name__ == "__main__":
    with telegrad.local(["worker0"]), autograd.context() as context_id:
        reference = rpc.remote("worker0", list, ([1, 2],))
        own = rpc.RRef([3])
        stream = rpc.rpc_stream("worker0", range, (10_000,))
        publisher = weights.Publisher("numbers", {"x": torch.ones(2)})
        publisher.publish()
        subscriber = weights.Subscriber("driver", "numbers")
        module = telegrad.nn.RemoteModule("worker0", torch.nn.Linear, (2, 2))
        reference.to_here()
        if os.fork() == 0:
            del reference, own, stream, publisher, subscriber, module
            gc.collect()
            sys.exit(0)  # through the ends of all these `with`, and of the interpreter
        assert os.wait()[1] == 0
        if os.fork() == 0:
            with stream, publisher, subscriber:
                sys.exit(3)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
        print([int(each) for each in DataLoader(Sampled(reference), num_workers=2)])
        process = multiprocessing.get_context("fork").Process(target=joins, args=(sys.argv[1],))
        process.start()
        process.join()
        assert process.exitcode == 0
        print(reference.to_here(), next(stream), subscriber.newest().number, module(torch.ones(1, 2)).shape)
        stream.close()
        publisher.close()
"""


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_children_drop_inherited_objects_and_end_silently(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), f"file://{tmp_path}/store"]
    environment = {**os.environ, "TELEGRAD_PROGRESS": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["[7, 7, 7, 7]", "[1, 2] 0 1 torch.Size([1, 2])"]


JOINS = """
import glob, os, signal, sys, threading, time
from telegrad import errors, insight, rpc
from tests.cluster import wait_until

me = rpc.TelegradOptions(init_method=sys.argv[1])

def joined(name, **more):
    rpc.init_rpc(name, rpc_backend_options=me, **more)

def wait_for(what):
    wait_until(lambda: glob.glob(os.environ["TELEGRAD_DUMPS"] + "/" + what))

if __name__ == "__main__":
    other = os.fork()
    if other == 0:
        joined("other")
        rpc.serve()
        os._exit(0)
    joined("parent", rank=0)
    rpc.wait_for_workers(["other"], timeout=20)
    rpc.rpc_sync("other", pow, (2, 3))
    child = os.fork()
    if child == 0:
        joined("child")
        assert "child" in insight.why() and insight.dump() is not None
        for path in glob.glob(os.environ["TELEGRAD_DUMPS"] + "/*"):
            os.remove(path)
        try:
            rpc.rpc_sync("other", time.sleep, (1,), timeout=0.1)
        except errors.CallTimeout:
            wait_for("*-child-*")
        os.remove(glob.glob(os.environ["TELEGRAD_DUMPS"] + "/*-child-*")[0])
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for("*-child-*")
        assert not glob.glob(os.environ["TELEGRAD_DUMPS"] + "/*-parent-*")
        rpc.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rpc.shutdown()
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_a_child_that_joins_a_group_reports_its_own_state(tmp_path: Any) -> None:
    program, dumps = tmp_path / "program.py", tmp_path / "dumps"
    program.write_text(JOINS)
    dumps.mkdir(mode=0o700)
    command = [sys.executable, str(program), f"file://{tmp_path}/store"]
    environment = {**os.environ, "TELEGRAD_DUMPS": str(dumps), "TELEGRAD_PROGRESS": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
