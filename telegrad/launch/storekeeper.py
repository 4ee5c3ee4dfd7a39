"""The process that serves a group's store for `telegrad run`. If the supervisor is killed, it kills the workers.

It reads lines from its standard input: `+PID` and `-PID` for process groups that start and end, `over` when the group
has ended, and `key FOLDER` for a folder to remove at the end. At the end of the input, the supervisor has ended.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

READY = b"ready\n"  # written to standard output once the store is served
AGAIN = 0.5  # seconds between two notes to the members that the group has ended

# The store and the `DirectoryMonitor`, once served. The thread `telegrad-serve` adds both in one step, which is atomic
# in the interpreter. So the main thread, which reads the list without a lock, sees none of them or both.
_served: list[Any] = []


def main(arguments: list[str]) -> None:
    """`arguments`: the listening socket's descriptor and the host's address; none if another host serves the store."""
    over = threading.Event()  # "over" was read
    # The store is served by another thread, because the import of torch takes seconds. This thread reads the process
    # groups from the first moment on: a supervisor that is killed meanwhile leaves none behind.
    if arguments:
        threading.Thread(target=_serve, args=(*arguments, over), name="telegrad-serve", daemon=True).start()
    else:
        _say_ready()
    started: set[int] = set()
    key_folder = ""
    for word in sys.stdin:
        if word.startswith("+"):
            started.add(int(word))
        elif word.startswith("-"):
            started.discard(-int(word))
        elif word.startswith("key "):
            key_folder = word[len("key ") :].rstrip("\n")
        # "over". Without a store no worker has joined, and there is no member to notify yet: `_serve` does it later.
        # With one this thread does it, since the input may end now, and the process with it.
        else:
            over.set()
            if _served:
                _end_group()
    for group in started:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if _served:
        _served[1].close()
    # The supervisor removes the folder itself, unless it was killed.
    if key_folder:
        shutil.rmtree(key_folder, ignore_errors=True)
    # Without the end of the interpreter, because the other thread may still be in the import of torch.
    os._exit(0)


def _serve(listener: str, host: str, over: threading.Event) -> None:
    try:
        import torch  # noqa: F401 - first, since the compatibility mode takes effect with it

        from telegrad.ext import joining
        from telegrad.ext.joining import find_directory
        from telegrad.ext.workers import serve_on

        keys = joining.find_keys()
        with socket.socket(fileno=int(listener)) as listening:
            port = listening.getsockname()[1]
            # A storekeeper that replaces a killed one finds the directory of the group by its note, which is named
            # after the port. The members that have joined continue to use that directory.
            keeping = find_directory.DirectoryMonitor(keys, host, find_directory.noted(port))
            store = joining.SealedStore(serve_on(listening)[0], keys)
        find_directory.note(port, keeping.pointer)
        find_directory.write_pointer(store, keeping.pointer._replace(launched=True))
        joining.KeyValueStore(store).write(joining.SERVED, joining.OPEN)
        joining.SealRenewal(store.renew).begin()
        # Last: from here on the main thread may end the group, and the supervisor is told that the store is served.
        _served.extend((store, keeping))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    _say_ready()
    # A note reaches only members that have joined. A program may end while the serving workers still import torch.
    over.wait()
    while True:
        _end_group()
        time.sleep(AGAIN)


def _end_group() -> None:
    """End the members of a dynamic group that only serve."""
    from telegrad.errors import TelegradError
    from telegrad.ext.joining import connect
    from telegrad.ext.workers import Registry

    store, keeping = _served
    directory = connect(keeping.pointer, store.keys)
    with contextlib.suppress(TelegradError):
        Registry(directory).end("the program that started the workers has ended the group")
    directory.close()


def _say_ready() -> None:
    with contextlib.suppress(OSError):  # the supervisor has ended meanwhile
        os.write(1, READY)


if __name__ == "__main__":
    main(sys.argv[1:])
