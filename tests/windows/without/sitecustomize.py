"""Remove what Windows lacks from this interpreter and from all that it starts; found by `PYTHONPATH`.

Python runs this before anything else, so later checks for a removed name fail. The platform keeps its name, since the
standard library and torch would load modules that exist on Windows only. SIGKILL stays, since `subprocess` needs it.
"""

import _socket
import errno
import os
import select
import signal
import socket
import stat
import sys
import time
import types
from typing import Any

ABSENT = {
    os: "fork forkpty register_at_fork memfd_create eventfd getuid geteuid getgid getegid getpgid getpgrp getsid "
    "setsid setpgid tcgetpgrp killpg nice sched_yield sched_getaffinity sysconf fchmod chown mkfifo sendfile preadv "
    "pwritev writev readv posix_fallocate getloadavg waitid O_DIRECTORY",
    select: "epoll poll",
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGSTOP SIGCONT SIGTSTP SIGALRM SIGQUIT SIGPIPE alarm setitimer pause "
    "pthread_sigmask pthread_kill sigwait siginterrupt",
    socket: "AF_UNIX SO_PEERCRED SO_REUSEPORT SCM_RIGHTS CMSG_SPACE CMSG_LEN TCP_USER_TIMEOUT MSG_DONTWAIT "
    "MSG_NOSIGNAL send_fds recv_fds sethostname",
    time: "clock_gettime clock_gettime_ns pthread_getcpuclockid tzset CLOCK_MONOTONIC CLOCK_REALTIME",
}
MODULES = ["fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "readline"]
FOLDERS = ("/proc/", "/dev/shm")
TICK = 1 / 64  # seconds, the resolution of the clock in Python before 3.13


class _Absent:
    """A descriptor that hides a method of a class that cannot be changed."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError


def _socketpair(*_: int) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        return there, listener.accept()[0]


def _is_absent(path: object) -> bool:
    return str(path).startswith(FOLDERS) and not str(path).startswith("/proc/self/fd")  # `subprocess` reads that


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.scandir", "os.listdir") and arguments and _is_absent(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(arguments[0]))


_dup, _close, _read, _monotonic = os.dup, os.close, os.read, time.monotonic


def _no_socket(descriptor: int) -> int:
    """Refuse sockets, which are not files on Windows."""
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return descriptor


for module, names in ABSENT.items():
    for name in names.split():
        for place in (module, _socket) if module is socket else (module,):
            if hasattr(place, name):
                delattr(place, name)
for name in MODULES:
    sys.modules[name] = None  # type: ignore[assignment]
for name in ("sendmsg", "recvmsg", "recvmsg_into", "sendmsg_afalg"):
    setattr(socket.socket, name, _Absent())
socket.socketpair = _socketpair  # type: ignore[assignment]
os.dup = lambda fd, /: _dup(_no_socket(fd))
os.close = lambda fd: _close(_no_socket(fd))
os.read = lambda fd, length, /: _read(_no_socket(fd), length)
time.monotonic = lambda: _monotonic() // TICK * TICK
del sys.modules["selectors"]  # the next import makes it without the removed names
_atfork: Any = types.ModuleType("torch.multiprocessing._atfork")  # torch's module checks the platform
_atfork.register_after_fork = id
sys.modules[_atfork.__name__] = _atfork
sys.addaudithook(_refuse)
