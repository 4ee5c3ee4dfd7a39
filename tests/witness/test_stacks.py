"""The stacks of all threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREEZES = """
import gc, threading, time
from telegrad.witness.stacks import all_frames

class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(1e-4)

def start_threads():
    while not over.is_set():
        thread = threading.Thread(target=Garbage)
        thread.start()
        thread.join()

over = threading.Event()
starter = threading.Thread(target=start_threads)
starter.start()
gc.freeze()
gc.set_threshold(1)
for _ in range(200):
    Garbage()
    assert threading.get_ident() in all_frames()
assert gc.isenabled()
over.set()
starter.join()
"""


@pytest.mark.timeout(60)
def test_frames_are_had_while_threads_start_and_garbage_is_collected() -> None:
    subprocess.run([sys.executable, "-c", FREEZES], check=True, timeout=50)
