"""What a process that `telegrad run` has started knows from its environment."""

from __future__ import annotations

from collections.abc import Mapping

from telegrad._core.addresses import bracketed

NAME, ROLE = "TELEGRAD_NAME", "TELEGRAD_ROLE"  # of the worker; one that is started again has the same
STORE = "TELEGRAD_STORE"  # where the store is that is kept for it: it never serves one itself
RESTARTS = "TELEGRAD_RESTARTS"  # how often it was started again


def own_name(name: str | None, role: str, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """The name and the role with which a worker joins: those of the environment, for who gives no name or that one."""
    own, its_role = environment.get(NAME), environment.get(ROLE, "")
    if not own or name not in (None, own) or role not in ("", its_role):
        return name, role
    return own, its_role


def variables(name: str, role: str, restarts: int, host: str, port: int) -> dict[str, str]:
    """Those by which `init_rpc()` needs no argument."""
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        STORE: place(host, port),
        NAME: name,
        ROLE: role,
        RESTARTS: str(restarts),
    }


def is_kept(host: str, port: int | str, environment: Mapping[str, str]) -> bool:
    """Whether the store at that place is one which somebody keeps who is no worker."""
    return environment.get(STORE) == place(host, port)


def place(host: str, port: int | str) -> str:
    return f"{bracketed(host)}:{port}"
