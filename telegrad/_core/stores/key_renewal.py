"""Seals a store again while the group's key is being replaced, if no other thread reads the store.

Some stores are read rarely, and also by workers that only have the new key: the store that points to the directory of a
dynamic or elastic group, and such a directory if its values are sealed; the store of a group of fixed size that no
worker serves (a file, or torchrun's), which restarted workers read again; and the store that `telegrad run` serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from telegrad._core.threads import Background
from telegrad.errors import TelegradError

LOOK = 1.0  # seconds between checks of the key file
PATIENCE = 1.0  # seconds for the thread to end

log = logging.getLogger("telegrad")


class SealRenewal:
    """A thread that renews one store or directory."""

    def __init__(self, renew: Callable[[], None]) -> None:
        """`renew` seals the values again if the key was replaced; it is called once a second."""
        self._renew = renew
        self._over = threading.Event()
        self._thread = Background("telegrad-renewal", self._main)

    def begin(self) -> None:
        self._thread.want()

    def close(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)

    def _main(self) -> None:
        while not self._over.wait(LOOK):
            try:
                self._renew()
            except (TelegradError, RuntimeError) as error:
                log.debug("telegrad: the store cannot be sealed again, because it is lost: %s", error)
                return
