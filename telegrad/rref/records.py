"""What one worker knows of one reference: see protocol.py, which keeps these records."""

from __future__ import annotations

from dataclasses import dataclass, field

from telegrad.rref.letters import Id


@dataclass(slots=True)
class Share:
    """What a user has of a reference: its one fork, and what keeps that alive."""

    owner: str
    fork: Id
    confirmed: bool
    handles: int = 1
    parents: list[tuple[str, Id]] = field(default_factory=list)  # to be told once the owner knows the fork
    extras: list[Id] = field(default_factory=list)  # known to the owner, given back once the fork is confirmed
    children: dict[Id, str] = field(default_factory=dict)  # sent on, and not settled
    fault: str = ""


@dataclass(slots=True)
class Owned:
    """What the owner knows of a reference."""

    made: bool  # the value exists, or the call that creates it has come, or never will
    handles: int = 0
    forks: dict[Id, str] = field(default_factory=dict)  # where each lives, or is on its way to
