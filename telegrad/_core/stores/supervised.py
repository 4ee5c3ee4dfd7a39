"""The environment of a process that `telegrad run` has started."""

from __future__ import annotations

from collections.abc import Mapping

from telegrad._core.sockets import bracketed

NAME, ROLE = "TELEGRAD_NAME", "TELEGRAD_ROLE"  # of the worker; a restarted worker has the same
STORE = "TELEGRAD_STORE"  # the address of the store served for the worker, which never serves one itself
RESTARTS = "TELEGRAD_RESTARTS"  # the number of its restarts


def own_name(name: str | None, role: str, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the name and the role of a worker: from the environment, unless the program gives others."""
    own, its_role = environment.get(NAME), environment.get(ROLE, "")
    if not own or name not in (None, own) or role not in ("", its_role):
        return name, role
    return own, its_role


def variables(name: str, role: str, restarts: int, host: str, port: int) -> dict[str, str]:
    """Return the variables that make `init_rpc()` need no argument."""
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        STORE: place(host, port),
        NAME: name,
        ROLE: role,
        RESTARTS: str(restarts),
    }


def is_supervised(host: str, port: int | str, environment: Mapping[str, str]) -> bool:
    """Return True if a process that is not a worker serves the store at that address."""
    return environment.get(STORE) == place(host, port)


def place(host: str, port: int | str) -> str:
    return f"{bracketed(host)}:{port}"
