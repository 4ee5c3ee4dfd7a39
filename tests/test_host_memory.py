"""How much memory a process may use, with files that a container would show."""

from __future__ import annotations

from pathlib import Path

import pytest

from telegrad._core.host import resources
from telegrad.rpc import TelegradOptions

MACHINE = 64 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(resources, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(resources, "_of_machine", lambda: MACHINE)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_groups_it_is_that_of_the_machine(groups: Path) -> None:
    assert resources.usable_memory() == MACHINE
    assert TelegradOptions().shared_memory == MACHINE // 2
    assert TelegradOptions(shared_memory=7).shared_memory == 7


def test_the_smallest_limit_above_the_process_holds(groups: Path) -> None:
    put(groups / "own", "0::/system/job\n")
    put(groups / "groups" / "system" / "job" / "memory.max", "max\n")
    assert resources.usable_memory() == MACHINE
    put(groups / "groups" / "system" / "memory.max", f"{8 << 30}\n")
    assert resources.usable_memory() == 8 << 30
    put(groups / "groups" / "memory.max", f"{6 << 30}\n")
    assert TelegradOptions().shared_memory == 3 << 30


def test_groups_of_the_first_version(groups: Path) -> None:
    put(groups / "own", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    put(groups / "groups" / "memory" / "job" / "memory.limit_in_bytes", "9223372036854771712\n")
    put(groups / "groups" / "memory" / "memory.limit_in_bytes", f"{2 << 30}\n")
    assert resources.usable_memory() == 2 << 30
    put(groups / "own", "what is this\n")
    assert resources.usable_memory() == MACHINE


def test_here_it_is_some() -> None:
    assert resources._of_machine() > 1 << 20
