"""Fixtures that several files of tests use."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from telegrad.directories import etcd
from telegrad.directories.etcd import EtcdDirectory

Connect = Callable[..., EtcdDirectory]


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the contract that a class of an engine has as `nightly`."""
    for item in items:
        if isinstance(item, pytest.Function) and {item.name, item.originalname} & {*getattr(item.cls, "nightly", ())}:
            item.add_marker("nightly")


@pytest.fixture
def connected() -> Iterator[Connect]:
    """Yield a function that makes etcd clients, which are closed after the test."""
    with contextlib.ExitStack() as stack:

        def connect(url: str, patience: float = 10.0) -> EtcdDirectory:
            return stack.enter_context(contextlib.closing(etcd.connect(url, patience)))

        yield connect
