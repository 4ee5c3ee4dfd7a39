"""The programs of docs/groups.md run, one after the other, and what it lists as said is said."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests.cluster import PATIENCE
from tests.test_running import ALL, pattern_of

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "groups.md").read_text()
PROGRAM = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
SYMPTOMS = re.findall(r"^\| `([^`]+)` \|", PAGE[PAGE.index("## What it says") :], re.MULTILINE)

SAID = """\
<Group role 'actor': actor0, actor1, actor2, actor3>
['actor0', 'actor2'] ['actor1', 'actor3']
[9, 9, 9, 9]
too heavy
{'actor0': 2.0,
tensor([6., 6.])
[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]
[105, 105, 105, 105]
[110, 110, 110, 110] [111, 112, 113, 114]
112 <RRef
['actor1', 'actor2', 'actor3']
[111, 112, 113, 114]
[0.0, 0.0, 0.0, 0.0]
[1.0, 1.0, 1.0, 1.0]
tensor([1.5000, 1.5000, 1.5000, 1.5000])
"""


@pytest.mark.timeout(4 * PATIENCE)
def test_the_programs_run(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ended = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=3 * PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    left = ended.stdout
    for words in SAID.splitlines():
        assert words in left, ended.stdout
        left = left[left.index(words) :]
    assert sorted(re.findall(r"^(actor\d) \1$", ended.stdout, re.MULTILINE)) == [f"actor{n}" for n in range(4)]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_the_page_says_is_said_is_said(symptom: str) -> None:
    assert re.search(pattern_of(symptom), ALL)


def test_there_are_symptoms() -> None:
    assert len(SYMPTOMS) > 5
