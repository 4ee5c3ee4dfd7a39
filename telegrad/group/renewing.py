"""Has one process seal a store anew while the group's key is replaced, where no other thread looks at that store.

The members of a dynamic group and the leader of an elastic one look at their store all the time, and renew it. Two
stores outlive a look: that of a group of fixed size whose server is no worker (a file, the store of torchrun), which is
read again when its workers are started again; and the one that `telegrad run` keeps, also while no worker is there.
"""

from __future__ import annotations

import logging
import threading

from telegrad.errors import TelegradError
from telegrad.group.sealing import SealedStore
from telegrad.threads import Background

LOOK = 1.0  # seconds between looks at the key file
PATIENCE = 1.0  # seconds for the thread to end

log = logging.getLogger("telegrad")


class Renewal:
    """A thread that renews one store."""

    def __init__(self, store: SealedStore) -> None:
        self._store = store
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
                self._store.renew()
            except (TelegradError, RuntimeError) as error:
                log.debug("telegrad: the store cannot be sealed anew, as it is lost: %s", error)
                return

    def __repr__(self) -> str:
        return f"<Renewal of {self._store!r}{', closed' * self._over.is_set()}>"
