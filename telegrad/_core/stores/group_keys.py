"""Finds the key of a group, which proves that a process belongs to it.

The first of these that is set decides:

    key=... in the options     a key, or False for a group without one
    TELEGRAD_KEY               a key
    TELEGRAD_KEY_FILE          a file with a key; with a second line while the key is being replaced
    the user's own key file    `key` in the user's state folder, made by the first process that needs it

Therefore processes that one user starts separately, on one host or on hosts with a shared home, have the same key
without configuration. Neither the key nor data derived only from it is ever put into the rendezvous store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from telegrad._core.host.private_files import create_once, state_folder
from telegrad._core.security.keyring import Keyring, check_key, new_key, open_ring, read_keys
from telegrad.errors import UsageError

VARIABLE, FILE_VARIABLE = "TELEGRAD_KEY", "TELEGRAD_KEY_FILE"
FILE = "key"  # in the user's state folder

Key = str | bytes | bool | None  # as users give it; of the two bool only False is valid

log = logging.getLogger("telegrad")


def find_keys(given: Key = None, environment: Mapping[str, str] = os.environ) -> Keyring:
    """Return the keys to use for the option `given`.

    Raises:
        UsageError: there is none, or it is too short, or its file is not safe.
    """
    found = given_keys(given, environment)
    return found if found is not None else user_keys()


def given_keys(given: Key = None, environment: Mapping[str, str] = os.environ) -> Keyring | None:
    """Return the keys given by the program or its environment, or None without any.

    Raises:
        UsageError: a key is too short, or its file is not safe.
    """
    if given is False:
        log.warning(
            "telegrad: key=False: this group has no key. Anyone who reaches its workers can run code as their users"
        )
        return open_ring()
    if given is not None:
        return Keyring([check_key(given, "the option key")], source="the option key")
    keys, path, source = of_environment(environment)
    return Keyring(keys, path, source=source) if keys else None


def of_environment(environment: Mapping[str, str] = os.environ) -> tuple[list[bytes], str, str]:
    """Return the keys given by the environment, their file and their source; without keys, all three are empty.

    Programs that make their own key call this as well: an invalid setting is an error in each of them.

    Raises:
        UsageError: as for `given_keys`.
    """
    if VARIABLE in environment:
        return [check_key(environment[VARIABLE], VARIABLE)], "", VARIABLE
    path = environment.get(FILE_VARIABLE)
    if path is None:
        return [], "", ""
    if not path:
        raise UsageError(f"{FILE_VARIABLE} is empty: give the path of the file that holds the group's key, or unset it")
    return read_keys(path, FILE_VARIABLE), path, f"{FILE_VARIABLE} ({path})"


def user_keys() -> Keyring:
    """Return the keys in this user's own file, which is created if missing.

    Raises:
        UsageError: it cannot be made, or is not safe.
    """
    try:
        path = str(state_folder() / FILE)
        create_once(path, new_key() + b"\n")
    except UsageError as error:
        raise UsageError(
            f"no key is given, and this user's own key file cannot be used: {error}. Correct that, or give all workers "
            f"the same key of at least 16 bytes in {VARIABLE}, in a file that {FILE_VARIABLE} names, or by key=...; "
            "key=False makes a group without a key, in which anyone who reaches a worker can run code"
        ) from None
    return Keyring(read_keys(path), path, source=path)
