"""A schedule: `telegrad run` starts the workers, the events of the plan happen, and the records are judged."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.report import Report
from tests.chaos.supervised.judge import Blow, violations
from tests.chaos.supervised.plan import COUNTS, FOLDER, KEPT, KILLED, OF_THE_STORE, OWN, ROLES, SEED, Event, Plan
from tests.chaos.supervised.record import Life, Reader
from tests.cluster import free_port, pause

GLANCE = 0.02
PATIENCE = 60.0  # seconds for several interpreters to import torch, and for pauses between restarts
ENDS = 3.0  # seconds within which all processes end once `telegrad run` was killed
LEASES = 15.0  # seconds more for a directory that a worker started, which ends when the leases of killed workers expire
CALM = 0.3  # seconds of load after all have met
PLACE = "the group meets at "
ROOT = Path(__file__).parents[3]


class Failed(Exception):
    """The schedule cannot go on."""


class Schedule:
    """A run of `telegrad run`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._reader = Reader(folder)
        self._blows: list[Blow] = []
        self._guests: dict[str, subprocess.Popen[bytes]] = {}
        self._report = Report(schedules=1)
        self._own = f"tcp://127.0.0.1:{free_port()}" if plan.store != KEPT else ""
        self._environment = {**os.environ, FOLDER: str(folder), SEED: str(plan.seed), "PYTHONPATH": str(ROOT)}
        if self._own:
            self._environment[OWN] = self._own
        self._before = set(os.listdir("/dev/shm"))
        (folder / "roles.toml").write_text("\n".join(_role(*role) for role in COUNTS.items()))
        with (folder / "said").open("wb") as said:
            self._run = subprocess.Popen(
                [sys.executable, "-m", "telegrad", "run", "roles.toml"],
                cwd=folder,
                env=self._environment,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def live(self) -> Report:
        try:
            self._wait("all meet", self._all_met)
            for round_ in self._plan.rounds:
                self._suffer(round_)
                self._wait("all meet again", self._all_met)
                pause(CALM)
            self._end()
        except Failed as error:
            self._report.violations.append(f"{error}; telegrad run said:\n{self._said()[-6000:]}")
        finally:
            self._kill_all()
        self._tally()
        return self._report

    # Events

    def _suffer(self, round_: list[Event]) -> None:
        began = time.monotonic()
        stopped: list[threading.Timer] = []
        for event in round_:
            pause(began + event.start - time.monotonic())
            self._report.faults[event.kind] += 1
            if event.kind == "join":
                self._join(event.victim)
            elif event.kind in ("leave", "exit"):
                (self._folder / f"order-{event.victim}").write_text(event.kind)
            elif event.kind in OF_THE_STORE:
                stopped += self._strike(event.kind, self._keeper(), event.duration)
            elif life := self._lives().get(event.victim):
                stopped += self._strike(event.kind, (life.name, life.pid), event.duration)
                if event.kind == "again":
                    self._kill_again(life, event.duration)
        for timer in stopped:
            timer.join()

    def _strike(self, kind: str, whom: tuple[str, int], duration: float = 0.0) -> list[threading.Timer]:
        """Kill a process, or stop it for a while."""
        name, pid = whom
        with contextlib.suppress(ProcessLookupError):
            now = time.monotonic()
            if kind not in ("stop", "hang"):
                os.kill(pid, signal.SIGKILL)
                self._blows += [Blow(each, name, pid, now, float("inf")) for each in {kind, "kill"}]
                return []
            os.kill(pid, signal.SIGSTOP)
            self._blows.append(Blow(kind, name, pid, now, now + duration + 1.0))
            timer = threading.Timer(duration, _continue, (pid,))
            timer.start()
            return [timer]
        return []

    def _kill_again(self, life: Life, after: float) -> None:
        self._wait("who was killed comes back", lambda: "" if self._lives()[life.name].pid != life.pid else str(life))
        pause(after)
        self._strike("kill", (life.name, self._lives()[life.name].pid))

    def _join(self, name: str) -> None:
        environment = dict(self._environment)
        if not self._own:
            host, _, port = self._said().partition(PLACE)[2].partition(",")[0].partition(":")
            environment.update(MASTER_ADDR=host, MASTER_PORT=port, TELEGRAD_STORE=f"{host}:{port}")
        with (self._folder / f"{name}.said").open("wb") as said:
            self._guests[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.supervised.worker", name],
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def _keeper(self) -> tuple[str, int]:
        """Return the process that serves the store: a worker, or a process of `telegrad run`."""
        if self._own:
            inode = _listening(int(self._own.rpartition(":")[2]))
            for life in self._lives().values():
                if inode and f"socket:[{inode}]" in _open_files(life.pid):
                    return life.name, life.pid
        for pid in self._processes() if not self._own else ():
            if b"telegrad.launch.storekeeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return "the storekeeper", pid
        life = min(self._lives().values())  # it was killed before, or has another port
        return life.name, life.pid

    # Workers

    def _lives(self) -> dict[str, Life]:
        """Return the newest life of each worker."""
        return {note.life.name: note.life for note in self._reader.look() if note.what in ("joins", "joined")}

    def _all_met(self) -> str:
        """Describe which workers have not met; killed workers and those that left need not be met."""
        ended = {blow.pid for blow in self._blows if blow.kind == "kill"}
        notes = self._reader.look()
        left = {note.life for note in notes if note.what == "leaves"}
        joined = {note.life for note in notes if note.what == "joined"} - left
        here = {life.name: life for life in sorted(joined, key=lambda each: (each.number,)) if life.pid not in ended}
        if lacking := ({*ROLES, *self._guests} - {blow.name for blow in self._blows if blow.name in self._guests}) - {
            *here
        }:
            return f"{', '.join(sorted(lacking))} did not join"
        if list(self._folder.glob("order-*")):
            return "an order is not heard"
        met = {(note.life, Life(*note.told[0])) for note in notes if note.what == "met"}
        missing = [(one, here[name]) for one in here.values() for name in ROLES if (one, here[name]) not in met]
        return ", ".join(f"{one} did not meet {other}" for one, other in missing)

    def _wait(self, what: str, lacks: Callable[[], str], patience: float = PATIENCE) -> None:
        until = time.monotonic() + patience
        while said := lacks():
            if self._run.poll() is not None:
                raise Failed(f"telegrad run ended with {self._run.returncode}")
            if time.monotonic() > until:
                raise Failed(f"{what}: not within {patience:g} s: {said}")
            pause(GLANCE)

    # The end

    def _end(self) -> None:
        alive = [*self._lives().values()]
        (self._folder / "enough").touch()
        self._wait("the load ends", lambda: self._without("clean", alive))
        if self._plan.end == KILLED:
            self._run.kill()
        (self._folder / "end").touch()
        patience = ENDS if self._plan.end == KILLED else PATIENCE
        try:
            code = self._run.wait(PATIENCE)
            for guest in self._guests.values():
                guest.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the end: {error}") from None
        if code and self._plan.end != KILLED:
            self._report.violations.append(f"telegrad run ended with {code}:\n{self._said()[-6000:]}")
        began = time.monotonic()
        while left := self._processes():
            waits_for_leases = all("telegrad._core.stores.directory_server" in _command(pid) for pid in left)
            if time.monotonic() > began + patience + (LEASES if waits_for_leases else 0):
                break
            pause(GLANCE)
        self._report.violations += [f"process {pid} is left: {_command(pid)}" for pid in left]
        # Semaphores are of other programs that run beside this one.
        if more := {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} - self._before:
            self._report.violations.append(f"memory files are left: {sorted(more)}")

    def _without(self, what: str, lives: list[Life]) -> str:
        """Return the living workers that have not noted `what`."""
        has = {note.life.pid for note in self._reader.look() if note.what == what}
        return ", ".join(str(life) for life in lives if life.pid not in has and Path(f"/proc/{life.pid}").exists())

    def _kill_all(self) -> None:
        for pid in [self._run.pid, *self._processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self._run, *self._guests.values()):
            process.wait()

    def _processes(self) -> list[int]:
        """Return all processes of this schedule, which have its variable in their environment."""
        sign = f"{FOLDER}={self._folder}".encode()
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if sign in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def _tally(self) -> None:
        notes = self._reader.look()
        for note in notes:
            if note.what == "ended":
                operation, _, _, _, failure, took = note.told
                self._report.operations += 1
                self._report.by_kind[operation] += 1
                self._report.longest = max(self._report.longest, took)
                if failure:
                    self._report.errors[failure] += 1
        self._report.violations += violations(notes, self._blows)

    def _said(self) -> str:
        paths = [self._folder / "said", *(self._folder / f"{name}.said" for name in self._guests)]
        return "".join(path.read_text(errors="replace") for path in paths)


def run(plan: Plan) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return Schedule(plan, Path(folder)).live()


def _role(name: str, count: int) -> str:
    command = '["python", "-m", "tests.chaos.supervised.worker", "{name}"]'
    return f"[{name}]\ncommand = {command}\ncount = {count}\nrestarts = 1000\n"


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _listening(port: int) -> str:
    """Return the inode of the socket that listens at a port, "" if none does."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                return fields[9]
    return ""


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{entry}")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "it has ended meanwhile"
