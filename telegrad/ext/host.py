"""Files, processes, threads, forks, signals and addresses of this host. Other users of the host can neither plant nor
read the files."""

from telegrad._core import forks, interrupts
from telegrad._core.forks import in_child, renewed
from telegrad._core.interrupts import install, raised_by_handler, uninterrupted
from telegrad._core.private_files import (
    Folder,
    UnsafePath,
    create,
    create_once,
    make_folder,
    open_folder,
    open_regular,
    opened,
    private_folder,
    reason,
    replacing,
    resolved,
)
from telegrad._core.processes import (
    SAFE_PATH,
    STOPPED,
    check_open_files,
    describe_exit,
    error_text,
    instances,
    name_process,
    new_session_options,
    quoted,
    shared_cores,
    signal_at_parents_end,
    state_of,
    stopped,
    translate_error,
)
from telegrad._core.security.keyring import read_secret
from telegrad._core.sockets import (
    HAS_UNIX,
    accepts_connections,
    bracketed,
    credentials,
    family_of,
    is_address,
    listening_address,
    loopback,
    shut,
    socket_address,
    tune_tcp,
)
from telegrad._core.threads import Background, Thread, end_threads, run_in_thread

__all__ = [
    "HAS_UNIX", "SAFE_PATH", "STOPPED", "Background", "Folder", "Thread", "UnsafePath", "accepts_connections",
    "bracketed", "check_open_files", "create", "create_once", "credentials", "describe_exit", "end_threads",
    "error_text", "family_of", "forks", "in_child", "install", "instances", "interrupts", "is_address",
    "listening_address", "loopback", "make_folder", "name_process", "new_session_options", "open_folder",
    "open_regular", "opened", "private_folder", "quoted", "raised_by_handler", "read_secret", "reason", "renewed",
    "replacing", "resolved", "run_in_thread", "shared_cores", "shut", "signal_at_parents_end", "socket_address",
    "state_of", "stopped", "translate_error", "tune_tcp", "uninterrupted",
]  # fmt: skip
