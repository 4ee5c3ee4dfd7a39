"""Telegrad from the command line.

python -m telegrad script.py [arguments]          run a program written for torch.distributed.rpc on Telegrad
python -m telegrad -m package.module [arguments]  the same, for a module
python -m telegrad worker NAME [options]          start one worker of a group; `worker --help` lists the options
python -m telegrad run FILE | [options] -- ...    start workers by their roles, again when they fail; `run --help`
python -m telegrad why                            what keeps the groups of this host waiting; `why --help`
python -m telegrad top | dashboard                a live view of a group, in the terminal or the browser
python -m telegrad trace FILE                     the latest events of all workers of a group, as a timeline
python -m telegrad dump                           have workers write their state to files
python -m telegrad --version
python -m telegrad --help
"""

import builtins
import contextlib
import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType, TracebackType
from typing import Any

from telegrad.version import VERSION

INSIGHT = "why", "top", "dashboard", "trace", "dump"
PROGRAMS = "worker", "run"
COMMANDS = *PROGRAMS, *INSIGHT
ABOUT = "", "-h", "--help", "-V", "--version"

FAILED, INTERRUPTED, CLOSED = 2, 130, 141  # the last two as shells report them: 128 + SIGINT or SIGPIPE


def main() -> None:
    arguments = sys.argv[1:]
    first = arguments[0] if arguments else ""
    _let_operators_sleep()
    if __name__ != "__main__" and not sys.flags.safe_path:  # the installed command imports as `python -m` does
        with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
            sys.path[0] = os.getcwd()
    if first in (*ABOUT, *PROGRAMS) or (first in INSIGHT and not os.path.exists(first)):
        try:
            try:
                sys.exit(_run_command(first, arguments))
            finally:
                print(end="", flush=True)  # here, since an error of the interpreter's own flush cannot be caught
        except KeyboardInterrupt:  # Ctrl-C during the import of the command
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # the reader of the output has ended
            os._exit(CLOSED)  # at a normal end, the interpreter would flush the output, which fails again
        except OSError as error:
            if first in PROGRAMS and not isinstance(error.__context__, SystemExit):
                raise  # not of the flush above
            with contextlib.suppress(OSError):
                print(f"telegrad: {error}", file=sys.stderr)
            os._exit(FAILED)
    elif first == "-m":
        if len(arguments) == 1:
            sys.exit("python -m telegrad -m: name the module to run")
        _serve_torchs_name()
        sys.argv = arguments[1:]
        _run_module(arguments[1])
    elif first.startswith("-"):
        sys.exit(f"python -m telegrad: unknown option {first}; see python -m telegrad --help")
    else:
        if not os.path.exists(first):
            from telegrad._core.texts import did_you_mean

            if meant := did_you_mean(first, COMMANDS):
                sys.exit(f"python -m telegrad: there is no program or command {first!r}{meant}")
        _serve_torchs_name()
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        _run_script(first)


def _run_command(name: str, arguments: list[str]) -> int:
    """Run a command of Telegrad's own; return its exit code."""
    if sys.stdout is None and name not in ("", "dashboard", *PROGRAMS):  # these do more than print
        raise OSError("the standard output is closed")
    if name in ABOUT:
        text = f"telegrad {VERSION}" if name in ("-V", "--version") else __doc__
        print(text, file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "worker":
        from telegrad.launch import worker_command

        return worker_command.main(arguments[1:])
    if name == "run":
        if not hasattr(os, "killpg"):
            sys.exit("telegrad run: it needs Linux or macOS; here start workers by telegrad.local, or telegrad worker")
        from telegrad.launch import supervisor

        return supervisor.main(arguments[1:])
    from telegrad.insight import command

    return command.main(arguments)


def _serve_torchs_name() -> None:
    from telegrad import compat

    compat.install()


def _let_operators_sleep() -> None:
    """Let idle threads of torch's operators sleep, which leaves the cores to the other workers of the host.

    By default these threads poll for milliseconds. OpenMP reads the setting once, when torch is imported.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        os.environ["OMP_WAIT_POLICY"] = "passive"


# Programs that are run as if Python had started them directly. The module of a program stays `__main__` after its code
# has ended, because other workers may still call its functions until the interpreter exits. (`runpy` restores the
# former `__main__`.)


def _run_script(path: str) -> None:
    """Do the same as `python path`."""
    loader = SourceFileLoader("__main__", path)
    try:
        code = loader.source_to_code(loader.get_data(path), path)
    except OSError as error:
        sys.exit(f"python -m telegrad: can't open file {path!r}: {error.strerror}")
    except SyntaxError as error:
        sys.excepthook(SyntaxError, error.with_traceback(None), None)
        sys.exit(1)
    _run(code, __file__=path, __loader__=loader, __cached__=None)


def _run_module(name: str) -> None:
    """Do the same as `python -m name`."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:  # of the package that should have the module; or it is a relative name
        sys.exit(f"python -m telegrad: no module named {name} ({error})")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        sys.exit(f"python -m telegrad: no module named {name}")
    sys.argv[0] = str(spec.origin)
    about = {"__spec__": spec, "__file__": spec.origin, "__loader__": spec.loader, "__cached__": spec.cached}
    _run(code, __package__=spec.parent, **about)


def _run(code: CodeType, **about: Any) -> None:
    module = ModuleType("__main__")
    vars(module).update(about, __builtins__=builtins)
    sys.modules["__main__"] = module

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not code:  # as Python would show it, from the program on
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace or error.__traceback__), trace)

    sys.excepthook = show
    exec(code, vars(module))


if __name__ == "__main__":
    main()
