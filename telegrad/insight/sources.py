"""Groups to look at: that of this process, and those of this user on this host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

from telegrad.insight.outside import look_at, process_of
from telegrad.insight.phrases import several
from telegrad.insight.source import Sight
from telegrad.instruments import Event
from telegrad.safe_text import safe
from telegrad.witness import desk
from telegrad.witness.account import Account
from telegrad.witness.decoding import ACCOUNT, DUMP, GROUP, GROUP_EVENTS, Malformed
from telegrad.witness.desk import Place, ask_all

if TYPE_CHECKING:
    from telegrad.witness.witness import Witness

AT_ONCE = 32  # silent workers that are looked at at the same time
MOST_LOOKED_AT = 256  # silent workers that are looked at from outside; that takes half a second for each
PATIENCE = 1.0  # seconds for all workers of a group
SOON = 0.3  # the same, where they are asked once more anyway
OF_ALL = 5.0  # the same, for what one of them asks others about


class OwnGroup:
    """That of this process."""

    def __init__(self, witness: Any) -> None:
        self._witness: Witness = witness  # whose type is no part of the interface

    def look(self) -> Sight:
        accounts, silent = self._witness.look()
        if not silent:
            return Sight(accounts, silent)
        places = {place.pid: place for place in desk.places()}
        sockets = {member.name: member.unix for member in self._witness.observer.members()}
        here = {name: places.get(process_of(sockets.get(name, ""), places) or 0) for name in silent}
        silent = silent | _seen({name: place for name, place in here.items() if place is not None})
        return _sight(accounts, silent, [name for name, place in here.items() if place is not None])

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        return self._witness.events(after)


def own_group() -> OwnGroup:
    """That of this thread's worker.

    Raises:
        NotInitialized: this process is in no group.
    """
    from telegrad.rpc import current  # not above: who looks from outside has no torch

    return OwnGroup(current.here().witness)


class HostGroup:
    """One with workers on this host, which is looked at from outside."""

    def __init__(self, places: Iterable[Place], programs: Iterable[str] = ()) -> None:
        self._places = list(places)
        self._programs = sorted(programs)
        self._silent: set[Place] = set()  # at the last look; replaced as a whole

    def __str__(self) -> str:
        """The program, and those of its workers that are on this host, for people."""
        program = f"{', '.join(self._programs)}: " if self._programs else ""
        return program + several(sorted(place.worker for place in self._places))

    def is_called(self, name: str) -> bool:
        """Whether that is its program, or one of its workers."""
        return name in self._programs or any(place.worker == name for place in self._places)

    def dump(self) -> dict[str, str]:
        """Have the workers of this host write down what they are at: by worker, the file, or why there is none."""
        told = ask_all(self._places, DUMP, None, PATIENCE)
        silent = "nothing was written, it did not answer: {}"
        return {
            place.worker: silent.format(said) if isinstance(said, Exception) else str(said)
            for place, said in told.items()
        }

    def look(self) -> Sight:
        told = ask_all(self._places, ACCOUNT, None, PATIENCE)
        answered: list[Any] = [each for each in told.values() if isinstance(each, dict)]
        accounts: dict[str, Account] = {each["worker"]: each for each in answered}
        self._silent = {place for place, each in told.items() if not isinstance(each, dict)}
        silent = _seen({place.worker: place for place in self._silent if not isinstance(told[place], Malformed)})
        silent |= {place.worker: str(told[place]) for place in self._silent if place.worker not in silent}
        beyond = others_of(accounts.values()) - silent.keys()
        if beyond and accounts:
            answering = next(place for place, each in told.items() if isinstance(each, dict))
            group = ask_all([answering], GROUP, None, OF_ALL)[answering]
            if isinstance(group, dict):
                others: list[Account] = [each for each in group["accounts"] if each["worker"] in beyond]
                accounts |= {each["worker"]: each for each in others}
                silent = {name: why for name, why in group["silent"].items() if name in beyond} | silent
        accounts_told = sorted(accounts.values(), key=lambda each: each["rank"])
        return _sight(accounts_told, silent, [place.worker for place in told])

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        for place in sorted(self._places, key=lambda each: each in self._silent):
            told = ask_all([place], GROUP_EVENTS, dict(after), OF_ALL)[place]
            if isinstance(told, dict):
                return told
        return {}


def groups_here() -> dict[str, HostGroup]:
    """All groups of this user with workers on this host, by their ids; of those still to be, by their place.

    Root has those of all users. A worker is taken for one of a group of its own user only.
    """
    told = ask_all(desk.places(), ACCOUNT, None, SOON)
    found: dict[tuple[int, str], list[Place]] = {}
    known: dict[tuple[int, str], list[Any]] = {}  # what the others tell
    silent: list[Place] = []
    for place, account in told.items():
        if isinstance(account, dict):
            group = place.user, account["group"] or account["place"]
            found.setdefault(group, []).append(place)
            known.setdefault(group, []).append(account)
        else:
            silent.append(place)
    for place in silent:
        found.setdefault((place.user, _group_of(place, known)), []).append(place)
    alike = Counter(name for _, name in found)
    return {
        name if alike[name] == 1 else f"{name}@{user}": HostGroup(
            places, {account["program"] for account in known.get((user, name), ())}
        )
        for (user, name), places in found.items()
    }


def others_of(accounts: Iterable[Account]) -> set[str]:
    """The members that these know, and who are not among them."""
    known = {name for account in accounts for name in account["members"]}
    return known - {account["worker"] for account in accounts}


def _sight(accounts: Sequence[Account], silent: Mapping[str, str], here: Collection[str]) -> Sight:
    """Who does not answer, runs not `here` as far as can be seen, and was lost by another worker, is gone."""
    gone = {name for account in accounts for name in account["gone"]}
    return Sight(accounts, {name: why for name, why in silent.items() if name in here or name not in gone})


def _group_of(place: Place, known: Mapping[tuple[int, str], list[Account]]) -> str:
    """Of a worker that does not answer: the one group whose members miss one of that name, or the only one there is."""
    own = {name: accounts for (user, name), accounts in known.items() if user == place.user}
    missing = [group for group, accounts in own.items() if place.worker in others_of(accounts)]
    groups = missing if missing else list(own)
    return groups[0] if len(groups) == 1 else ""


def _seen(silent: Mapping[str, Place]) -> dict[str, str]:
    """Why workers do not answer, as far as it can be seen; of many, some are not looked at."""
    if not silent:
        return {}
    looked = dict(islice(silent.items(), MOST_LOOKED_AT))
    with ThreadPoolExecutor(min(AT_ONCE, len(looked))) as pool:
        states = pool.map(lambda place: safe(look_at(place.pid, place.stacks).state), looked.values())
        return dict.fromkeys(silent, "it did not answer in time") | dict(zip(looked, states, strict=True))
