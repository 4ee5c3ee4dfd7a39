"""The reports of the runner are right, and torch's own RPC is disabled."""

import pathlib
import types
from typing import Any

import pytest
import torch

from tests.conformance import applicable, native, report
from tests.conformance.parent import last_line
from tests.conformance.results import FAILED, NOT_APPLICABLE, PASSED, Result, worse

TWO_RANKS = """Traceback (most recent call last):
  File "case.py", line 58, in testPartExecutor
    yield
RuntimeError: Process 0 exited with error code 10 and exception:
Traceback (most recent call last):
  File "rpc_test.py", line 1, in test
    check()
ValueError:
no such
thing

Process 2 exited with error code 10 and exception:
Traceback (most recent call last):
  File "rpc_test.py", line 2, in test
    rpc_sync()
telegrad.errors.PeerLost: worker 'worker0' was lost
"""
RUN = report.Run(
    "2.0",
    1.4,
    [
        Result("A.test_x", PASSED, 1.0, ""),
        Result("A.test_y", FAILED, 1.0, "TypeError: `no`"),
        Result("B.test_z", NOT_APPLICABLE, 0.0, "no device"),
    ],
)


def test_the_last_line_is_the_cause() -> None:
    assert (last_line(TWO_RANKS), last_line("not a traceback")) == ("ValueError: no such", "not a traceback")


def test_the_worst_of_several_runs_counts() -> None:
    passed, failed = RUN.results[:2]
    assert worse(passed, failed) == worse(failed, passed) == failed


def test_a_report_keeps_the_text_above_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "report.md"
    path.write_text(f"# Mine\n\n{report.MARKER}\nold\n")
    report.write(RUN, path)
    text = path.read_text()
    assert text.startswith(f"# Mine\n\n{report.MARKER}\n\n3 tests of torch 2.0")
    assert "| `A` | 1 | 1 | 0 | 2 |\n| `B` | 0 | 0 | 1 | 1 |\n| **all** | 1 | 1 | 1 | 3 |" in text
    assert "### torch skips it: no device (1)\n\n- `B`: `test_z`\n" in text
    assert "- `A.test_y`: `TypeError: 'no'`\n" in text
    assert "old" not in text


def test_reasons_are_found_by_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applicable, "NOT_APPLICABLE", {"because": ("A.test_*", "B.gone")})
    assert [applicable.reason(f"{suite}.test_x") for suite in "AB"] == ["because", None]
    assert applicable.stale(["A.test_x"]) == ["B.gone"]


def test_torchs_own_rpc_is_disabled(capfd: pytest.CaptureFixture[str]) -> None:
    holder: Any = types.ModuleType("holder")
    room: Any = types.ModuleType(native.RPC)
    holder.call = room._invoke_rpc_builtin = torch._C._distributed_rpc._invoke_rpc_builtin
    native.forbid([holder, room])
    with pytest.raises(AssertionError, match="_invoke_rpc_builtin"):
        holder.call()
    assert native.MARK in capfd.readouterr().err
