"""Run tests in processes of their own that have the accelerator.

Loading it changes the answers of `torch.accelerator` in the whole process, and autograd's engine counts the devices
only once in a process. So one process loads the accelerator and does nothing else, and forks a child for each test.
"""

import atexit
import contextlib
import faulthandler
import functools
import importlib
import os
import reprlib
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 50.0


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a fresh process that has the accelerator; its arguments have to be picklable."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        __tracebackhide__ = True
        server = _server(os.getpid())
        server.send((test.__module__, test.__qualname__, arguments, named))
        failure = server.recv()
        if failure is not None:
            raise AssertionError(f"in a process of its own:\n{failure}")

    run.body = test  # type: ignore[attr-defined]
    return run


@functools.cache
def _server(owner: int) -> Connection:
    """Return the connection to the server of this process; the server ends when the connection closes."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-c", f"from tests.accelerator.apart import serve; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
    connection = Connection(ours.detach())
    atexit.register(connection.close)
    return connection


def serve(descriptor: int) -> None:
    """Run the requested tests, each in a child."""
    from tests import accelerator

    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    accelerator.load()
    importlib.import_module("torch._dynamo")  # optimizers import it; once here is cheaper than in each child
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_fork(*connection.recv()))


def _fork(module: str, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    """Run a test in a child; return its failure, if any."""
    try:
        test: Any = importlib.import_module(module)
        for part in name.split("."):
            test = getattr(test, part)
    except Exception:
        return traceback.format_exc()
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        reader.close()
        writer.send(_outcome(test.body, arguments, named))
        sys.stdout.flush()
        os._exit(0)
    writer.close()
    try:
        if reader.poll(PATIENCE):
            return reader.recv()
        os.kill(child, signal.SIGABRT)  # its handler prints the stacks of all threads
        return f"not done after {PATIENCE:.0f} seconds"
    except EOFError:
        return "the process died; see its standard error"
    finally:
        reader.close()
        os.waitpid(child, 0)


def _outcome(test: Callable[..., None], arguments: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    try:
        test(*arguments, **named)
    except BaseException as problem:
        text = traceback.format_exc()
        where = [frame for frame, _ in traceback.walk_tb(problem.__traceback__) if frame.f_code is test.__code__]
        shown = {name: reprlib.repr(value) for name, value in where[-1].f_locals.items()} if where else {}
        return text + "".join(f"    {name} = {value}\n" for name, value in shown.items())
    return None
