"""Tests of the file of roles."""

import pathlib
import re
from typing import Any

import pytest

from telegrad.errors import UsageError
from telegrad.launch.policy import KEYS, RESTART_ROLE, SERVE, RunConfig, read

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "supervision.md").read_text()


def test_the_file_of_the_page_is_read() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    plan = read(text, {})
    learner, actor, buffer, cache = plan.roles
    assert (plan.logs, plan.grace) == ("logs", 10.0)
    assert (learner.command, learner.serves, learner.count) == (("python", "learner.py"), False, 1)
    assert (actor.count, actor.restarts, actor.within) == (4, 10, 600)
    assert (buffer.command, buffer.serves) == (SERVE, True)
    assert (cache.command, cache.serves) == (("python", "cache.py"), True)
    slots = plan.slots(0)
    assert [slot.name for slot in slots] == ["learner0", "actor0", "actor1", "actor2", "actor3", "buffer0", "cache0"]
    assert slots[3].filled_in(actor.command[-1]) == "2"
    assert all(f"`{key}`" in PAGE for key in (*KEYS, *RunConfig._fields[1:]))


def test_options_change_and_complete_the_file() -> None:
    text = "grace = 1\n[actor]\ncommand = 'x'\nenv = {A = 1, B = 2}\n"
    changes = {"actor": {"count": 2, "env": {"B": "3"}}, "critic": {"on_failure": RESTART_ROLE}, "logs": "there"}
    plan = read(text, changes)
    actor, critic = plan.roles
    assert (plan.logs, plan.grace) == ("there", 1)
    assert (actor.command, actor.count, actor.env) == (("x",), 2, {"A": "1", "B": "3"})
    assert (critic.command, critic.on_failure) == (SERVE, RESTART_ROLE)
    assert read("", {"a": {"command": "train.py -n 1"}}).roles[0].command == ("python", "--", "train.py", "-n", "1")


def test_names_are_numbered_from_host_to_host() -> None:
    plan = read("[driver]\nnode = 0\n[actor]\ncount = 2", {})
    assert [slot.name for slot in plan.slots(0)] == ["driver0", "actor0", "actor1"]
    assert [slot.name for slot in plan.slots(2)] == ["actor4", "actor5"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no role"),
        ("[actor", "not valid TOML"),
        ("[actor]\ncuont = 2", "did you mean 'count'"),
        ("lgos = 'x'\n[a]", "did you mean 'logs'"),
        ("[actor]\nname = 'x'", "role 'actor' has a key 'name'"),
        ("['a b']", "is not valid as a worker's role"),
        ("[actor]\ncount = 0", "count must be the number"),
        ("[actor]\ncount = true", "count must be the number"),
        ("[actor]\ncount = 10001", "count must be the number of its workers, from 1 to 10000"),
        ("[actor]\ncount = 1.5", "count must be the number"),
        ("[actor]\nrestarts = -1", "restarts must be a number"),
        ("[actor]\nwithin = 0", "within must be a number"),
        ("[actor]\non_failure = 'panic'", "restart, restart-role, end"),
        ("[actor]\nserves = 1", "serves must be true or false"),
        ("[actor]\nnode = -1", "node must be the number"),
        ("[actor]\ncommand = ''", "role 'actor': command must be a string or a list"),
        ("[actor]\ncommand = [1]", "role 'actor': command must be a string or a list"),
        ("[actor]\ncommand = 1", "role 'actor': command must be a string or a list"),
        ('[actor]\ncommand = "a \'b"', "cannot be split into words: No closing quotation"),
        ("command = 'a'\n[actor]", "the keys of a role go below its table, such as [actor]"),
        ("grace = -1\n[actor]", "grace must be a number of seconds, 0 or more, not -1"),
        ("[actor]\nenv = 'x'", "role 'actor': env must be a table"),
        ("[actor]\nenv = {X = []}", "role 'actor': env must be a table"),
        ("[actor]\nenv = {'A=B' = '3'}", "role 'actor': env must be a table"),
        ("logs = 1\n[a]", "logs must be the name"),
        ('logs = "\\u0000"\n[a]', "logs must be the name"),
        ("grace = 'x'\n[a]", "grace must be a number"),
        ("[[actor]]", "actor"),
    ],
)
def test_invalid_files_are_refused(text: str, words: str) -> None:
    changes: dict[str, Any] = {}
    with pytest.raises(UsageError, match=re.escape(words)):
        read(text, changes)
