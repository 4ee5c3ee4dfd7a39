"""Reading the stacks of all threads."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

import pytest

from telegrad.reporting.stacks import all_stacks


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_stacks_are_read(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    told = sys._current_frames

    def tell() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return told()

    monkeypatch.setattr(sys, "_current_frames", tell)
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert threading.get_ident() in all_stacks()
        assert seen == [False]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
