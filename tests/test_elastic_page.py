"""The program of docs/elastic.md works."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from telegrad._core.membership.generations import look
from telegrad._core.security.keyring import user_keys
from telegrad._core.stores.find_directory import POINTER, Pointer, connect
from telegrad._core.stores.sealed_store import KeyValueStore
from telegrad._core.stores.stores import open_store
from tests.cluster import PATIENCE, wait_until

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "elastic.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STEPS = 5000


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_program_goes_on_after_a_worker_is_killed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    place = f"file://{tmp_path}/store"
    environment = {**os.environ, "MEET": place, "STEPS": str(STEPS)}
    command = [sys.executable, str(path)]
    made = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        store = open_store(place, -1, None, user_keys(), PATIENCE).store
        wait_until(lambda: KeyValueStore(store).read(POINTER))
        with contextlib.closing(
            connect(Pointer.from_json(KeyValueStore(store).read(POINTER)), user_keys())
        ) as directory:
            wait_until(lambda: len(look(directory).running.members) == 2)
        made[0].kill()
        out, _ = made[1].communicate(timeout=4 * PATIENCE)
        assert made[1].returncode == 0
        assert out.split() == [str(sum(step * step for step in range(STEPS)))]
    finally:
        for process in made:
            process.kill()
            process.communicate()
