"""Where a worker meets the others: as its program says; where that says nothing, as whoever launched it says."""

from __future__ import annotations

import logging
import os

from telegrad.errors import RendezvousError, UsageError
from telegrad.group import on_ray
from telegrad.group.keys import Key, find_keys, given_keys
from telegrad.group.stores import Meeting, open_store
from telegrad.group.surroundings import look_around, one_of_several

SAID_BY_ENVIRONMENT = "env://"

log = logging.getLogger("telegrad")


def open_meeting(init_method: str, rank: int, world_size: int | None, key: Key, timeout: float) -> Meeting:
    """Open the store. What the program says holds; a rank without a size is that of a dynamic group.

    Raises:
        UsageError: what is said, by the program or by the launcher, cannot be, or is not enough; or there is no key.
        RendezvousError: the store cannot be opened.
    """
    if init_method != SAID_BY_ENVIRONMENT or rank != -1 or world_size is not None:
        return open_store(init_method, rank, world_size, find_keys(key), timeout)
    if on_ray.places_this_process(os.environ):
        _check_drivers()
        return on_ray.meet(timeout, given_keys(key))
    found = look_around(os.environ)
    if found is None:
        return open_store(init_method, rank, world_size, find_keys(key), timeout)
    log.info("telegrad: %s", found)
    try:
        return open_store(found.init_method, found.rank, found.size, find_keys(key), timeout)
    except (UsageError, RendezvousError) as error:
        raise type(error)(f"{error} ({found})") from error


def find_place(init_method: str, rank: int) -> tuple[str, int]:
    """Where an elastic group meets, and the rank that this worker would like to have: likewise; its size is its own.

    Raises:
        UsageError: what the launcher says cannot be, or is not enough.
    """
    found = look_around(os.environ) if init_method == SAID_BY_ENVIRONMENT else None
    if found is None:
        return init_method, rank
    log.info("telegrad: %s", found)
    return found.init_method, found.rank if rank == -1 else rank


def _check_drivers() -> None:
    """Raise UsageError where a launcher has started several drivers of Ray: each would have a group of its own."""
    launcher = one_of_several(os.environ)
    if launcher and on_ray.is_driver():
        raise UsageError(
            f"this process is a driver of Ray, and one of several that {launcher} has started. To meet one another, "
            "set MASTER_ADDR on all of them; to meet the actors of a job of Ray's, start its driver once"
        )
