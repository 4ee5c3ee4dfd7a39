"""Fixtures: one group of worker processes serves all tests that do not break it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pathlib
import signal
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests.cluster import Process, agents, free_port, group
from tests.insight.browsers import BROWSER, OPTIONS

if TYPE_CHECKING:
    from tests.rpc.test_publishing import Crowd

# torch's store looks up the names of its clients; a silent name server would delay each connection by 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for commands in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests do not use the shared key and the other state of the user's own programs.
_STATE = tempfile.TemporaryDirectory(prefix="telegrad-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# A busy machine may take long for any example.
hypothesis.settings.register_profile("patient", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("patient")

if torch.version.cuda and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet()  # torch 2.11 may crash if its compiler does this late in a process


# Collections by tests ignore torch, whose objects take 0.3 s to search. The objects of tests must be found.
gc.collect()
gc.freeze()


def pytest_collection_finish() -> None:
    """Do the same with the collected tests, which are as many objects again."""
    gc.freeze()
    gc.collect()  # the interpreter collects by itself once there are more new objects than a quarter of those left here


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function by `asyncio.run`, or by its fixture `run`."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    run: Any = pyfuncitem.funcargs.get("run", asyncio.run)
    run(pyfuncitem.function(**arguments))
    return True


@pytest.fixture(scope="module", autouse=True)
def used_worker() -> Iterator[None]:
    """After each module, let this thread use the worker of the process again."""
    yield
    current.enter(None)


@pytest.fixture
def tcp() -> str:
    """Return a TCP address at which the workers of a test meet."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="session")
def workers() -> Iterator[list[Process]]:
    """Start four processes in one group, `worker0` to `worker3`."""
    with group(4) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    """Make two agents in this process."""
    with agents(2) as made:
        yield made


@pytest.fixture(scope="module")
def five() -> Iterator[list[Worker]]:
    """Make five agents in this process, `w0` to `w4`."""
    with agents(5) as made:
        yield made


@pytest.fixture
def here(five: list[Worker]) -> Iterator[None]:
    """Use `w0` on this thread."""
    current.enter(five[0])
    yield
    current.enter(None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser, if there is one."""
    if BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def crowd(tmp_path: pathlib.Path) -> Iterator[Crowd]:
    """Make a dynamic group of `w0` to `w2` in this process, and use `w0` on this thread."""
    from tests.rpc.test_publishing import Crowd

    made = Crowd(tmp_path)
    try:
        for rank, name in enumerate(["w0", "w1", "w2"]):
            made.add(name, rank)
        current.enter(made.workers["w0"])
        yield made
    finally:
        current.enter(None)
        for worker in made.workers.values():
            worker.end("")
