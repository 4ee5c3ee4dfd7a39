"""What docs/groups.md lists as said is said."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.test_running import ALL, pattern_of

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "groups.md").read_text()
SYMPTOMS = re.findall(r"^\| `([^`]+)` \|", PAGE[PAGE.index("## What it says") :], re.MULTILINE)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_the_page_says_is_said_is_said(symptom: str) -> None:
    assert re.search(pattern_of(symptom), ALL)


def test_there_are_symptoms() -> None:
    assert len(SYMPTOMS) > 5
