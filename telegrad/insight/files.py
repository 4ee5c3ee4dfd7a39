"""What workers have written down when something went wrong, as a group to look at."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from telegrad.errors import UsageError
from telegrad.insight.source import Sight
from telegrad.instruments import Event
from telegrad.private_files import open_regular
from telegrad.witness.account import Account
from telegrad.witness.decoding import FILE, Malformed, decode
from telegrad.witness.dump import LARGEST

MOST = 2 * LARGEST  # bytes of a file: one with no events may have some more


class Written:
    """Files of `telegrad.witness.dump`; of a worker with several, the newest counts."""

    def __init__(self, paths: Iterable[str | pathlib.Path]) -> None:
        """Raises UsageError where one is no such file."""
        self._told: dict[str, dict[str, Any]] = {}
        for path in map(pathlib.Path, paths):
            try:
                with open_regular(path) as file:
                    text = file.read(MOST + 1)
                if len(text) > MOST:
                    raise Malformed(f"it has over {MOST >> 20} MiB")
                content = decode(FILE, text)
                account: Account = content["account"]
                before = self._told.get(account["worker"])
                if before is None or before["account"]["time"] < account["time"]:
                    self._told[account["worker"]] = content
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from None
            except Malformed as error:
                raise UsageError(f"{path} is no file that a worker has written: {error}") from None

    def look(self) -> Sight:
        accounts = [content["account"] for content in self._told.values()]
        known = {name for account in accounts for name in account["members"]} - self._told.keys()
        return Sight(accounts, dict.fromkeys(sorted(known), "there is no file of it"))

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        return {
            name: [event for event in content["events"] if event[2] > after.get(name, 0.0)]
            for name, content in self._told.items()
        }
