"""User code that forks on a worker, on any thread on which the package runs user code.

The end of the user's code ends the child, with its exit code, before any code of the package continues there. The child
prints the output of the user's code only, and the worker serves as before.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.cluster import PATIENCE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")

PLACES = """
import asyncio, os, sys, time
from telegrad import errors, rpc

statuses = []


def fork_here(how):
    pid = os.fork()
    if pid:
        statuses.append(os.waitpid(pid, 0)[1])
        return
    try:
        rpc.rpc_sync("driver", int)
        os._exit(99)
    except errors.NotInitialized:
        pass
    if how == "raises":
        raise ValueError("of the child")
    if how == "exits":
        sys.exit(3)
    if how == "os._exit":
        os._exit(5)


def function(how):
    fork_here(how)


class Actor:
    def act(self, how):
        fork_here(how)


async def coroutine(how):
    fork_here(how)


async def waits(how):
    pid = os.fork()
    await asyncio.sleep(0)
    if pid == 0:
        os._exit(98)
    statuses.append(os.waitpid(pid, 0)[1])


def generator(how):
    fork_here(how)
    return
    yield


def yields(how):
    pid = os.fork()
    yield 1
    if pid == 0:
        os._exit(98)
    statuses.append(os.waitpid(pid, 0)[1])


class Opened:
    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        return fork_here, (self.how,)


class Packed:
    def __init__(self, how):
        self.how = how

    def __getstate__(self):
        fork_here(self.how)
        return {}


class Freed:
    def __init__(self, how):
        self.how = how

    def __del__(self):
        fork_here(self.how)


@rpc.functions.async_execution
def callback(how):
    return rpc.rpc_async("worker1", time.sleep, (0.05,)).then(lambda _: fork_here(how))


@rpc.functions.async_execution
def done_callback(how):
    future = rpc.rpc_async("worker1", time.sleep, (0.05,))
    future.add_done_callback(lambda _: fork_here(how))
    return future


def hooked(tensor, how):
    result = tensor * 2
    result.register_hook(lambda gradient: fork_here(how))
    return result


def registers(how):
    asked = []
    rpc.on_join(lambda _: asked or (asked.append(1), fork_here(how)))


def take():
    found = statuses[:]
    statuses.clear()
    return found
"""

PROGRAM = """
import json, os, time
import torch
import telegrad
from telegrad import autograd, rpc
from places import *  # the functions of a module that workers import, so that all have one list of what they note


def backward(how):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", hooked, (torch.ones(2, requires_grad=True), how)).sum()
        autograd.backward(context_id, loss)


PLACES = {
    "function": lambda how: rpc.rpc_sync("worker0", function, (how,)),
    "actor": lambda how: rpc.remote("worker0", Actor).rpc_sync().act(how),
    "coroutine": lambda how: rpc.rpc_sync("worker0", coroutine, (how,)),
    "generator": lambda how: list(rpc.rpc_stream("worker0", generator, (how,))),
    "opened": lambda how: rpc.rpc_sync("worker0", str, (Opened(how),)),
    "packed": lambda how: rpc.rpc_sync("worker0", Packed, (how,)),
    "callback": lambda how: rpc.rpc_sync("worker0", callback, (how,)),
    "done_callback": lambda how: rpc.rpc_sync("worker0", done_callback, (how,)),
    "backward": backward,
    "on_join": lambda how: rpc.rpc_sync("worker0", registers, (how,)),
}


def status():
    until = time.monotonic() + 20
    while not (found := rpc.rpc_sync("worker0", take)) and time.monotonic() < until:
        pass
    return found


if __name__ == "__main__":
    with telegrad.local(2):
        told = {}
        for place, act in PLACES.items():
            # os._exit runs no code of the package, so one place is enough.
            for how in ("returns", "raises", "exits", *(["os._exit"] if place == "function" else [])):
                act(how)
                told[f"{place} {how}"] = status()
        rpc.remote("worker0", Freed, ("returns",)).owner()
        told["freed returns"] = status()
        rpc.rpc_sync("worker0", waits, ("",))
        told["waits"] = status()
        list(rpc.rpc_stream("worker0", yields, ("",)))
        told["yields"] = status()
        assert rpc.rpc_sync("worker0", os.fork) > 0
        print(json.dumps(told))
"""

CODES = {"returns": 0, "raises": 1, "exits": 3, "os._exit": 5, "waits": 1, "yields": 1}
OF_THE_CHILD = re.compile(r'\[worker0\] (Traceback|  File "[^"]*/places.py"|    |ValueError: of the child)')


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_the_child_ends_with_the_users_code(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "places.py").write_text(PLACES)
    command, environment = [sys.executable, str(program)], {**os.environ, "TELEGRAD_PROGRESS": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, env=environment)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert {name: [os.waitstatus_to_exitcode(each) for each in found] for name, found in told.items()} == {
        name: [CODES[name.split()[-1]]] for name in told
    }
    lines = [line for line in ran.stderr.splitlines() if not OF_THE_CHILD.match(line)]
    suspended = [line for line in lines if "`yield` or `await`, and only the worker continues from there" in line]
    assert (len(suspended), lines) == (2, suspended), ran.stderr
    assert ran.stderr.count("ValueError: of the child") == sum("raises" in name for name in told)
