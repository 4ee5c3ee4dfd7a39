"""Reading the stacks of all threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

import pytest

from telegrad.reporting.stacks import all_stacks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be forked here")
@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_stacks_are_read_except_in_a_child(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    told = sys._current_frames

    def tell() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        if not (child := os.fork()):
            os._exit(gc.isenabled() != enabled or sys.getswitchinterval() != interval)
        assert os.waitpid(child, 0)[1] == 0
        return told()

    monkeypatch.setattr(sys, "_current_frames", tell)
    was, interval = gc.isenabled(), sys.getswitchinterval()
    (gc.enable if enabled else gc.disable)()
    try:
        assert threading.get_ident() in all_stacks()
        assert seen == [False]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
