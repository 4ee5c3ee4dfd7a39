"""Deferred modules exist at once, and run at their first use. The test makes its own module, in this process."""

import builtins
import importlib
import pathlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from telegrad.compat.substitution import catch_up, forget_import, put_off_import
from tests.cluster import in_threads

SOURCE = """
import builtins
builtins.runs_of_dear = getattr(builtins, "runs_of_dear", 0) + 1
import dear.part
from dear.part import PART
given = "its own"
other = 2
"""


@pytest.fixture
def dear(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make a deferred package that counts how often its code runs."""
    (tmp_path / "dear").mkdir()
    (tmp_path / "dear" / "__init__.py").write_text(SOURCE)
    (tmp_path / "dear" / "part.py").write_text("PART = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.runs_of_dear", 0, raising=False)
    put_off_import("dear", lambda module: setattr(module, "given", "ours"))
    yield importlib.import_module("dear")
    forget_import("dear")
    for name in [name for name in sys.modules if name.startswith("dear")]:
        del sys.modules[name]


def runs() -> int:
    return vars(builtins)["runs_of_dear"]


def test_a_given_name_does_not_run_the_package(dear: ModuleType) -> None:
    from dear import given  # type: ignore[import-not-found]

    assert given == "ours"
    assert runs() == 0


def test_a_submodule_does_not_run_the_package(dear: ModuleType) -> None:
    import dear.part  # type: ignore[import-not-found, no-redef]

    assert dear.part.PART == 1
    assert runs() == 0


def test_other_names_run_the_package_once_and_keep_given_names(dear: ModuleType) -> None:
    assert dear.other == 2
    assert dear.PART == 1
    assert dear.given == "ours"
    assert runs() == 1
    assert sys.modules["dear"] is dear
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dear.nothing


def test_a_star_import_runs_the_package(dear: ModuleType) -> None:
    names: dict[str, object] = {}
    exec("from dear import *", names)
    assert names["other"] == 2
    assert names["given"] == "ours"


def test_dunder_names_do_not_run_the_package(dear: ModuleType) -> None:
    assert not hasattr(dear, "__wrapped__")
    assert dear.__name__ == "dear"
    assert runs() == 0


def test_many_threads_run_the_package_once(dear: ModuleType) -> None:
    start = threading.Barrier(8)

    def ask() -> Any:
        start.wait()
        return dear.other, importlib.import_module("dear") is dear

    assert in_threads(*[ask] * 8) == [(2, True)] * 8
    assert runs() == 1


def test_catch_up_runs_the_package(dear: ModuleType) -> None:
    catch_up("dear")
    assert vars(dear)["other"] == 2
    assert "__getattr__" not in vars(dear)
