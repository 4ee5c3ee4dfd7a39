"""`python -m telegrad run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telegrad.errors import UsageError
from telegrad.ext.host import loopback
from telegrad.launch.output import Output
from telegrad.launch.policy import POLICIES, read
from telegrad.launch.supervisor import Supervisor

WRONG = 2  # the exit code for wrong arguments, or an address that cannot be used
DEFAULT = "worker"  # the role of options before the first --role

USAGE = "python -m telegrad run [FILE] [options] [--role NAME [options of that role]]... [-- COMMAND ...]"
EPILOG = """\
Options change a role of the file, or add one: `telegrad run roles.toml --role actor --count 8`.

signals:
  SIGINT, SIGTERM, SIGHUP  are sent on to all workers except serving ones, which end after the others. A worker that
                           has not ended after --grace seconds is killed. A second signal kills all at once
  SIGUSR1                  prints the state of each worker
  SIGUSR2                  is sent on to all workers, which write their state to a file

exit codes:
  0      all workers except serving ones ended with 0
  2      invalid arguments, or an invalid file
  127    a command could not be started
  130    Ctrl-C; 143 SIGTERM, 129 SIGHUP
  other  that of the worker whose failure ended the group; 128 plus its number for a signal
"""


def main(arguments: list[str]) -> int:
    options, command = _split(arguments)
    given = _parser().parse_args(options)
    if command:
        given.roles.setdefault(given.last, {})["command"] = command
    if given.file and given.file.endswith(".py"):
        return _wrong(
            f"{given.file} is a script, but FILE describes workers (TOML). `telegrad run -- python {given.file}` "
            "starts a worker with that command, with --count 4 four. A script that calls telegrad.local starts its own "
            f"workers: python {given.file}"
        )
    try:
        options_of_run = {key: getattr(given, key) for key in ("logs", "grace") if getattr(given, key) is not None}
        plan = read(Path(given.file).read_text() if given.file else "", {**given.roles, **options_of_run})
    except (UsageError, OSError, UnicodeDecodeError) as error:
        return _wrong(f"{given.file or 'options'}: {error}")
    try:
        host, port = _place(given.master)
        if given.node < 0 or not plan.slots(given.node):
            raise UsageError(f"no role runs on node {given.node}")
        if given.node and not port:
            raise UsageError("--node needs the --master of node 0")
        output = Output(plan.logs)
        supervisor = Supervisor(plan, host, port, given.node, output)
    except (UsageError, OSError) as error:
        return _wrong(str(error))
    try:
        return supervisor.run()
    finally:
        output.close()


def _wrong(text: str) -> int:
    print(f"telegrad run: {text}", file=sys.stderr)
    return WRONG


class _OfRole(argparse.Action):
    """An option of the role that was named last."""

    def __call__(self, parser: argparse.ArgumentParser, given: argparse.Namespace, value: Any, _: Any = None) -> None:
        if self.dest == "role":
            given.last = value
            given.roles.setdefault(value, {})
            return
        table = given.roles.setdefault(given.last, {})
        if self.dest == "env":
            key, equals, text = value.partition("=")
            if not equals:
                parser.error(f"--env {value}: write NAME=VALUE")
            table.setdefault("env", {})[key] = text
        else:
            table[self.dest] = value if self.nargs is None else True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m telegrad run",
        usage=USAGE,
        description="Run workers on this host, and restart them when they fail. See docs/supervision.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(roles={}, last=DEFAULT)
    parser.add_argument("file", nargs="?", metavar="FILE", help="such as roles.toml")
    parser.add_argument("--logs", metavar="FOLDER", help="gets a new folder with a file for each worker (logs)")
    parser.add_argument("--grace", type=float, metavar="SECONDS", help="time for workers to end, once asked to (10)")
    parser.add_argument("--master", metavar="HOST:PORT", help="where the group meets (a free port, for this host only)")
    parser.add_argument(
        "--node", type=int, default=0, metavar="N", help="which of several hosts this is (0: keeps the store)"
    )
    role = parser.add_argument_group("a role", "Options of the last named role, else of a role named `worker`.")
    own: dict[str, Any] = {"action": _OfRole, "default": argparse.SUPPRESS}
    role.add_argument("--role", metavar="NAME", **own, help="its workers are NAME0, NAME1, ...")
    role.add_argument("--command", **own, help="their command; may also follow --; without one, they serve")
    role.add_argument("--count", type=int, **own, help="how many there are (1)")
    role.add_argument("--env", metavar="NAME=VALUE", **own, help="a variable; {name} and {number} are the worker's")
    role.add_argument("--restarts", type=int, metavar="N", **own, help="how often each may be restarted (3) ...")
    role.add_argument("--within", type=float, metavar="SECONDS", **own, help="... within this time (300)")
    role.add_argument("--on-failure", choices=POLICIES, **own, help="restart it, all of its role, or end the group")
    role.add_argument("--serves", nargs=0, **own, help="they serve until the workers of other roles have ended")
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--`, and those after it."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _place(master: str | None) -> tuple[str, int]:
    if master is None:
        return loopback(), 0
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--master {master}: write HOST:PORT")
    return host.strip("[]"), int(port)
