"""Run a program in a process that is forked from a warm one, so that nothing is imported again; its workers, too."""

import ast
import atexit
import builtins
import contextlib
import linecache
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import traceback
import types
from typing import Any, NamedTuple, cast

import torch

from telegrad import compat
from telegrad._core.pickling import function_names
from telegrad.launch import local, worker_command
from tests.cluster import free_port
from tests.docs.blocks import Cell

STARTED = ("telegrad", "worker")


class Outcome(NamedTuple):
    out: str
    error: str  # the traceback of the program's error, or ""
    said: str  # the other lines of it and its workers on stderr
    printed: dict[tuple[str, int], list[str]]  # the printed text by file and line


def perform(
    cells: list[Cell], modules: dict[str, str], file: str, arguments: list[str], installs: bool, folder: str
) -> Outcome:
    """Run the program in this process, with `modules` beside it; the process cannot be used for anything else."""
    os.chdir(folder)
    for name, text in modules.items():
        pathlib.Path(name).write_text(text)
    os.dup2(os.open("out", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(os.open("err", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    sys.argv = [file, *arguments]
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    if any('"MASTER_PORT"' in cell.text for cell in cells):  # the port of the page may be in use
        os.environ["MASTER_PORT"] = str(free_port())
    _fork_instead_of_spawning()
    if installs:
        compat.install()
    printed = _listen_to_prints()
    error = ""
    try:
        _execute(cells, os.path.join(folder, file or "program.py"))
    except BaseException:
        error = traceback.format_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome(pathlib.Path("out").read_text(), error, pathlib.Path("err").read_text(), printed)


def _execute(cells: list[Cell], path_of_program: str) -> None:
    """Run the cells as one program, whose line numbers are those of the page."""
    module = types.ModuleType("__main__")
    module.__file__ = path_of_program  # workers compare programs by the content of this file
    pathlib.Path(path_of_program).write_text("\n".join(cell.text for cell in cells))
    sys.modules["__main__"] = module
    for text, path, line in cells:
        tree = ast.increment_lineno(ast.parse(text), line - 1)
        exec(compile(tree, str(path), "exec"), module.__dict__)


def _listen_to_prints() -> dict[tuple[str, int], list[str]]:
    printed: dict[tuple[str, int], list[str]] = {}
    write = builtins.print

    def listen(*values: object, sep: str | None = None, **how: Any) -> None:
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        printed.setdefault(place, []).append((" " if sep is None else sep).join(map(str, values)))
        write(*values, sep=sep, **how)

    builtins.print = listen
    return printed


def _fork_instead_of_spawning() -> None:
    process: Any = multiprocessing.process.current_process()
    process._config["daemon"] = False  # allows children
    fork, context, host = multiprocessing.get_context("fork"), cast(Any, multiprocessing), cast(Any, local)
    context.get_context = lambda method=None: fork
    host.subprocess = types.SimpleNamespace(
        Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


class Forked:
    """Replaces `Popen` in `telegrad.local`, for processes of `python -m telegrad worker`."""

    def __init__(self, command: list[str], env: dict[str, str], stdout: int, stderr: int, **_: Any) -> None:
        given = command[command.index("-m") + 1 :]  # without the options of the interpreter
        assert tuple(given[:2]) == STARTED
        stdin, to_worker = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._be_worker(given[2:], env, [stdin, stdout, stderr])
        os.close(stdin)
        self.stdin = os.fdopen(to_worker, "wb")
        self._ended = threading.Event()
        threading.Thread(target=self._reap, daemon=True).start()

    def _be_worker(self, arguments: list[str], env: dict[str, str], ends: list[int]) -> None:
        code = 1
        try:
            os.setsid()
            for number, end in enumerate(ends):
                os.dup2(end, number)
            os.closerange(3, 256)  # closes those of the parent, so that its end is noticed
            os.environ.update(env)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            sys.modules["__main__"] = types.ModuleType("__main__")  # a worker lacks the program's definitions
            function_names.program.cache_clear()
            linecache.clearcache()
            code = worker_command.main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _reap(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a worker", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the process may have just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)
