"""Tests of elastic groups of processes: kills, stops, lost stores and directories, servers, and torchrun."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import autograd, checkpoint, errors, optim
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership import form_generations
from telegrad._core.membership.form_generations import DirectoryLease
from telegrad._core.membership.generations import COME, GENERATION
from telegrad._core.modules.module_tree import branches
from telegrad._core.sockets import accepts_connections
from telegrad._core.stores import sealed_store
from telegrad._core.stores.directory import Swap
from telegrad._core.stores.directory_client import EmbeddedDirectory
from telegrad._core.worker import current
from telegrad.nn import RemoteModule
from telegrad.reporting.introspection import introspection_of
from tests.cluster import PATIENCE, Process, free_port, pause, processes, run_all, wait_until
from tests.rpc.members import error_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(params=["tcp", pytest.param("file", marks=pytest.mark.nightly)])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/store"


def options(place: str, **own: Any) -> TelegradOptions:
    return TelegradOptions(init_method=place, **{"rpc_timeout": PATIENCE, **own})


def join(place: str, name: str, least: int = 1, most: int | None = None, rank: int = -1, **own: Any) -> Any:
    form_generations.LAST_CALL = 0.3
    rpc.init_rpc(name, rank=rank, min_workers=least, max_workers=most, rpc_backend_options=options(place, **own))
    return rpc.generation()


STATE = {"step": 0, "total": 0, "over": 0}
FOLDER = pathlib.Path()
ENDS: dict[int, int] = {}  # by step: 1 if the program ends after it


def state_here() -> dict[str, int]:
    return STATE


def part(step: int) -> tuple[int, int]:
    """Return a worker's part in a step, and 1 if the step is the last one, which rank 0 decides for all."""
    return step * step, ENDS.setdefault(step, int((FOLDER / "done").exists()))


def train(place: str, name: str, folder: str, least: int = 2, most: int = 4, **own: Any) -> tuple[Any, ...]:
    """Make steps until the folder has a file `done`; return the last state and the generations."""
    global STATE, FOLDER
    STATE, FOLDER = {"step": 0, "total": 0, "over": 0}, pathlib.Path(folder)
    try:
        join(place, name, least, most, **own)
    except errors.GroupEnded:
        return {}, []
    rpc.on_lost(lambda *_: (FOLDER / f"{name}.lost").touch())
    seen: list[tuple[int, int, int]] = []
    number = 0
    while not (STATE["over"] and number):
        try:
            now = rpc.rendezvous_again()
            if now.number != number:
                if now.survivors:
                    STATE = rpc.rpc_sync(now.survivors[0], state_here)
                number = now.number
                seen.append(now[:3])
                lives = [member.incarnation for member in current.joined().membership.present()]
                with open(FOLDER / f"log {name} {os.getpid()}", "a") as log:
                    log.write(json.dumps([number, now.size, lives]) + "\n")
                continue
            parts = [rpc.rpc_async(worker, part, (STATE["step"],)).wait() for worker in rpc.workers()]
            value, over = parts[0]
            STATE = {"step": STATE["step"] + 1, "total": STATE["total"] + value, "over": over}
            _tell(name, STATE["step"], now.size)
        except errors.PeerError:
            number = 0
        except errors.GroupEnded:  # the others knew of the end, and left before this worker made its last step
            return STATE, seen
    rpc.shutdown()
    return STATE, seen


def _tell(name: str, step: int, size: int) -> None:
    (FOLDER / f"{name}.new").write_text(f"{step} {size}")
    (FOLDER / f"{name}.new").rename(FOLDER / name)


def is_right(state: dict[str, int]) -> bool:
    return state["total"] == sum(step * step for step in range(state["step"]))


def told(folder: pathlib.Path, name: str) -> tuple[int, int]:
    """Return the step of a worker, and the size of its generation."""
    path = folder / name
    step, size = path.read_text().split() if path.exists() else (0, 0)
    return int(step), int(size)


def wait_for_steps(folder: pathlib.Path, name: str, count: int, size: int = 0) -> None:
    """Wait until a worker has made so many more steps, and its generation has that size."""
    first = told(folder, name)[0]
    wait_until(lambda: told(folder, name)[0] >= first + count and size in (0, told(folder, name)[1]))


def end(folder: pathlib.Path, made: list[Process]) -> list[Any]:
    (folder / "done").touch()
    return [process.end() for process in made]


def test_a_dead_worker_is_dropped_and_may_come_back(place: str, tmp_path: pathlib.Path) -> None:
    with processes(4) as made:
        for number, process in enumerate(made[:3]):
            process.begin(train, place, f"w{number}", str(tmp_path), 2, 3)
        wait_for_steps(tmp_path, "w0", 5, 3)
        made[0].kill()  # which serves the store, most likely
        wait_for_steps(tmp_path, "w1", 5, 2)
        made[3].begin(train, place, "w0", str(tmp_path), 2, 3)
        wait_for_steps(tmp_path, "w1", 5, 3)
        found = end(tmp_path, made[1:])
    assert all(state == found[0][0] and is_right(state) for state, _ in found)
    assert [[(number, size) for number, _, size in seen] for _, seen in found[:2]] == [[(1, 3), (2, 2), (3, 3)]] * 2
    assert found[2][1] == [(3, 2, 3)]
    assert sorted(seen[-1][1] for _, seen in found[:2]) == [0, 1], "survivors have the lowest ranks"


@pytest.mark.nightly
def test_spare_workers_wait_for_a_place_or_for_the_end(tcp: str, tmp_path: pathlib.Path) -> None:
    with processes(4) as made:
        for number, process in enumerate(made):
            process.begin(train, tcp, f"w{number}", str(tmp_path), 2, 2)
        wait_until(lambda: any(told(tmp_path, f"w{number}")[0] > 5 for number in range(4)))
        first = next(number for number in range(4) if told(tmp_path, f"w{number}")[0])
        made[first].kill()
        others = [number for number in range(4) if number != first]
        wait_until(lambda: sum(told(tmp_path, f"w{number}")[0] > 10 for number in others) == 2)
        found = end(tmp_path, [made[number] for number in others])
    assert sorted(len(seen) for _, seen in found) == [0, 1, 2]  # one never joined, one joined later, one was there
    assert all(is_right(state) for state, seen in found if seen)


def crash(place: str, least: int) -> str:
    join(place, "survivor", least, rpc_timeout=1.0)
    while True:
        try:
            rpc.rendezvous_again()
        except errors.GroupIncomplete as error:
            try:
                rpc.workers()
            except errors.NotInitialized:
                return str(error)


def test_too_few_workers_raise_group_incomplete(tcp: str) -> None:
    with processes(2) as made:
        made[0].begin(crash, tcp, 2)
        made[1].begin(join, tcp, "victim", 2)
        made[1].end()
        made[1].kill()
        said = made[0].end()
    assert "1 s" in said
    assert "1 worker of 2 or more joined: 'survivor'" in said


def values_end(place: str, name: str, folder: str) -> dict[str, str]:
    """Return the errors of objects of an old generation, the texts without ids and numbers of generations."""
    join(place, name, 2, 3)
    other = next(worker for worker in rpc.workers() if worker.name != name)
    theirs = rpc.remote(other, torch.ones, (2,))
    theirs.to_here()
    mine = rpc.RRef(torch.ones(2))
    layer = RemoteModule(other, torch.nn.Linear, (2, 2))
    optimizer = optim.DistributedOptimizer.for_module(torch.optim.SGD, layer, lr=0.1)
    pending = rpc.rpc_async(other, time.sleep, (PATIENCE,))
    found = {}

    def tell(what: str, act: Any) -> None:
        kind, said = error_of(act)
        over = r"generation \d+ of the group has ended; .*, or restore them from a checkpoint; then"
        says_all = re.search(rf"{over}|to the next generation .* Call it again after rendezvous_again", said)
        found[what] = f"{kind.__name__}{'' if says_all else said}" if kind else ""

    with autograd.context() as context:
        number = rpc.generation().number
        rpc.rpc_sync(other, torch.add, (torch.ones(2, requires_grad=True), 1))
        (pathlib.Path(folder) / name).touch()
        wait_until(lambda: rpc.rendezvous_again().number != number)
        tell("pending", pending.wait)
        tell("to_here", theirs.to_here)
        tell("sent", lambda: rpc.rpc_sync(other.name, id, (theirs,)))
        tell("mine", lambda: rpc.rpc_sync(other.name, id, (mine,)))
        tell("save", lambda: checkpoint.save({"layer": layer}, f"{folder}/checkpoint"))
        tell("state", layer.state_dict)
        tell("optimizer", optimizer.state_dict)
        tell("step", lambda: optimizer.step(context))
        tell("gradients", lambda: autograd.get_gradients(context))
        tell("context", lambda: autograd.backward(context, [torch.ones((), requires_grad=True) * 2]))
        tell("new", lambda: rpc.rpc_sync(other.name, abs, (-1,)))
    rpc.shutdown()
    return found


def survive(place: str) -> list[str]:
    """Kill the other worker, and return the errors of a module on it, in a generation where no worker has its name."""
    join(place, "w0")
    wait_until(lambda: rpc.rendezvous_again().size == 2)
    layer = RemoteModule("w1", torch.nn.Linear, (2, 2))
    os.kill(rpc.rpc_sync("w1", os.getpid), signal.SIGKILL)
    wait_until(lambda: rpc.rendezvous_again().size == 1)
    found = [error_of(act)[0] for act in (layer.state_dict, layer.remote_parameters, lambda: branches(layer))]
    rpc.shutdown()
    return [kind.__name__ if kind else "" for kind in found]


def test_modules_of_a_lost_worker_raise_generation_over(tcp: str) -> None:
    with processes(2) as made:
        made[0].begin(survive, tcp)
        made[1].begin(serve, tcp, "w1", 1)
        assert made[0].end() == ["GenerationOver"] * 3


def just_join(place: str, name: str) -> Any:
    join(place, name, 2, 3)
    now = rpc.generation()
    rpc.shutdown()
    return now


def test_objects_of_an_old_generation_raise_specific_errors(tcp: str, tmp_path: pathlib.Path) -> None:
    with processes(3) as made:
        for number, process in enumerate(made[:2]):
            process.begin(values_end, tcp, f"w{number}", str(tmp_path))
        wait_until(lambda: len(list(tmp_path.glob("w*"))) == 2)
        made[2].begin(just_join, tcp, "late")
        found = [process.end() for process in made]
    for each in found[:2]:
        assert each == {
            "pending": "GenerationOver",
            "to_here": "GenerationOver",
            "sent": "GenerationOver",
            "mine": "GenerationOver",
            "save": "GenerationOver",
            "state": "GenerationOver",
            "optimizer": "GenerationOver",
            "step": "ContextEnded",
            "gradients": "ContextEnded",
            "context": "ContextEnded",
            "new": "",
        }
    assert found[2][:3] == (2, 2, 3)


def serve(place: str, name: str, least: int = 2) -> str:
    join(place, name, least)
    try:
        rpc.serve()
    except errors.TelegradError as error:
        return type(error).__name__
    return "ended"


def drive(place: str, name: str, steps: int, victims: list[int], size: int) -> list[int]:
    """Call all others in each step, and kill the victims by their process ids; return the sizes of the generations."""
    join(place, name, 2)
    with pytest.raises(errors.UsageError, match="in an elastic group"):
        rpc.stop_serving()
    sizes: list[int] = []
    for _ in range(steps):
        now = rpc.rendezvous_again()
        while now.size < size and not sizes:
            now = rpc.rendezvous_again()
        sizes.append(now.size)
        others = [worker for worker in rpc.workers() if worker.name != name]
        for worker in others:
            try:
                assert rpc.rpc_sync(worker, abs, (-1,)) == 1
            except errors.PeerError:
                pass
        if victims:
            os.kill(victims.pop(), 9)
    rpc.shutdown()
    return sizes


def test_servers_go_along_to_the_next_generation(tcp: str) -> None:
    with processes(4) as made:
        for number, process in enumerate(made[1:]):
            process.begin(serve, tcp, f"server{number}")
        made[0].begin(drive, tcp, "driver", 20, [made[1].pid], 4)
        sizes = made[0].end()
        assert [process.end() for process in made[2:]] == ["ended", "ended"]
    assert (sizes[0], sizes[-1]) == (4, 3)


@pytest.mark.nightly
def test_a_driver_that_died_comes_back_to_its_servers(tcp: str) -> None:
    with processes(4) as made:
        for number, process in enumerate(made[1:3]):
            process.begin(serve, tcp, f"server{number}")
        made[0].begin(drive, tcp, "driver", 1_000_000, [made[0].pid], 3)
        made[0].join()
        made[3].begin(drive, tcp, "driver", 20, [], 3)
        assert made[3].end()[-1] == 3
        assert [process.end() for process in made[1:3]] == ["ended", "ended"]


def straggle(place: str, name: str, sleeps: float) -> list[tuple[int, int]]:
    join(place, name, 1, 2, rpc_timeout=1.0)
    seen = [rpc.rendezvous_again()[:3:2]]
    time.sleep(sleeps)
    while len(seen) < (2 if sleeps else 3):
        now = rpc.rendezvous_again()[:3:2]
        if now != seen[-1]:
            seen.append(now)
    rpc.shutdown()
    return seen


@pytest.mark.nightly
def test_a_worker_that_is_late_is_left_out_and_comes_back(tcp: str) -> None:
    with processes(2) as made:
        made[0].begin(straggle, tcp, "quick", 0.0)
        made[1].begin(straggle, tcp, "slow", 3.0)
        assert [process.end() for process in made] == [[(1, 2), (2, 1), (3, 2)], [(1, 2), (3, 2)]]


def leave_early(place: str, name: str, steps: int, graceful: bool) -> list[int]:
    join(place, name, 2, 3)
    sizes = [rpc.rendezvous_again().size for _ in range(steps)]
    rpc.shutdown(graceful)
    return sizes


@pytest.mark.parametrize("graceful", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_worker_may_leave_before_the_others(tcp: str, graceful: bool) -> None:
    with processes(3) as made:
        for number, process in enumerate(made):
            process.begin(leave_early, tcp, f"w{number}", 5 if number == 2 else 10, graceful or number < 2)
        found = [process.end() for process in made]
    assert found[2] == [3] * 5
    assert all(sizes == [3] * 5 + [2] * 5 for sizes in found[:2])


def refused(place: str) -> list[tuple[type[Exception] | None, str]]:
    wrong: list[dict[str, Any]] = [
        {"min_workers": 0},
        {"min_workers": 3, "max_workers": 2},
        {"min_workers": 1, "world_size": 2},
    ]
    found = [error_of(rpc.init_rpc, "w", rpc_backend_options=options(place), **arguments) for arguments in wrong]
    rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options(place))
    found += [error_of(act) for act in (rpc.generation, rpc.rendezvous_again)]
    rpc.shutdown()
    return found


def test_wrong_sizes_and_groups_of_fixed_size_are_refused(tcp: str) -> None:
    with processes(1) as made:
        for kind, said in made[0].run(refused, tcp):
            assert kind is not None
            assert issubclass(kind, errors.UsageError)
            assert "min_workers" in said


def in_vain(place: str) -> tuple[str, str]:
    join(place, "w", 1, 2)
    with pytest.raises(errors.PeerLost) as alone:
        rpc.wait_for_workers(2)
    with pytest.raises(errors.UsageError) as called:
        rpc.rpc_sync("w", rpc.rendezvous_again)
    rpc.shutdown()
    return str(alone.value), str(called.value)


def test_waits_that_could_never_end_raise(tcp: str) -> None:
    with processes(1) as made:
        alone, called = made[0].run(in_vain, tcp)
    assert alone.endswith("not 2: w; a new worker joins at the next rpc.rendezvous_again()")
    assert "rpc.rendezvous_again() was called on worker 'w' by a remote call" in called


def wait_and_leave(place: str) -> tuple[str, float]:
    """Shut down on this thread while another waits for a worker that does not call rendezvous_again."""
    join(place, "a", 2, 2)
    number = rpc.rendezvous_again().number
    assert introspection_of(current.here()).account()["generation"] == number
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rpc.rendezvous_again, 0)
        wait_until(lambda: current.here().turning._steps._how)
        began = time.monotonic()
        with pytest.raises(errors.CallTimeout):
            rpc.shutdown(timeout=2)
        assert current.worker is None
        return type(waiting.exception(PATIENCE)).__name__, time.monotonic() - began


def test_a_shutdown_ends_the_wait_of_another_thread(tcp: str) -> None:
    with processes(2) as made:
        made[1].begin(join, tcp, "b", 2, 2)
        made[0].begin(wait_and_leave, tcp)
        name, seconds = made[0].end(2 * PATIENCE)
        assert (name, seconds < 2 + PATIENCE / 3) == ("ShutDown", True)


def leave_in_a_step(place: str, name: str, leaver: int) -> int:
    """The worker of rank `leaver` shuts down within a step, in which the others reduce a value; return a size."""
    join(place, name, 2, 3)
    wait_until(lambda: rpc.rendezvous_again().size == 3)
    now, workers = rpc.generation(), rpc.workers()
    if now.rank != leaver:
        with pytest.raises(errors.PeerLost, match=f"worker '{workers[leaver].name}' will not arrive: it has called"):
            rpc.group(workers).all_reduce(torch.ones(1))
        now = rpc.rendezvous_again()
    rpc.shutdown()
    return now.size


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_reduction_ends_if_a_worker_leaves_in_its_step(tcp: str, leaver: int) -> None:
    with processes(3) as made:
        assert sorted(run_all(made, lambda rank: leave_in_a_step(tcp, f"w{rank}", leaver))) == [2, 2, 3]


def meet() -> None:
    rpc.group(["b", "c"]).barrier()


def have_others_meet(place: str, name: str) -> None:
    join(place, name, 3, 3)
    if name == "a":
        first = rpc.rpc_async("b", meet)
        pause(1.2)  # in which it asks for workers that leave
        rpc.rpc_sync("c", meet)
        first.wait()
    rpc.shutdown()


def test_calls_to_workers_in_shutdown_may_meet_in_a_barrier(tcp: str) -> None:
    with processes(3) as made:
        assert run_all(made, lambda rank: have_others_meet(tcp, "abc"[rank])) == [None] * 3


waiting: list[Future[Any]] = []


def begin_to_wait() -> None:
    waiting.append(ThreadPoolExecutor(1).submit(rpc.rendezvous_again, 3))
    wait_until(lambda: current.here().turning._steps._how)


def end_of_waiting() -> Any:
    return waiting[0].result(PATIENCE)


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGSTOP")
def test_the_time_that_a_leader_was_stopped_does_not_count_as_a_wait(tcp: str) -> None:
    with processes(2) as made:
        for process, name in zip(made, "ab", strict=True):
            process.begin(join, tcp, name, 2, 2)
        leader, other = sorted(made, key=lambda process: process.end(2 * PATIENCE).rank)
        for process in made:
            process.run(rpc.rendezvous_again)  # the first returns at once
        leader.run(begin_to_wait)
        leader.kill(signal.SIGSTOP)
        time.sleep(3.5)
        leader.kill(signal.SIGCONT)
        other.begin(rpc.rendezvous_again)
        leader.begin(end_of_waiting)
        assert {(each.number, each.size) for each in (leader.end(), other.end())} == {(1, 2)}


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])])
def test_the_state_is_right_after_kills_at_random_moments(place: str, tmp_path: pathlib.Path, kills: int) -> None:
    """Workers are killed and started again; the state in the end is the same as without kills."""
    seed = int(os.environ.get("TELEGRAD_SEED", random.randrange(1 << 30)))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    with processes(4 + kills) as made:
        spare: Iterator[Process] = iter(made[4:])
        alive = dict(enumerate(made[:4]))
        for number, process in alive.items():
            process.begin(train, place, f"w{number}", str(tmp_path))
        wait_for_steps(tmp_path, "w0", 1)
        for _ in range(kills):
            pause(chance.uniform(0.0, 0.4))
            victim = chance.randrange(4)
            alive[victim].kill()
            alive[victim].join()
            alive[victim] = next(spare)
            pause(chance.uniform(0.0, 0.2))
            alive[victim].begin(train, place, f"w{victim}", str(tmp_path))
        wait_for_steps(tmp_path, "w0", 1, 4)
        found = end(tmp_path, list(alive.values()))
    assert all(state == found[0][0] and is_right(state) for state, _ in found)


# Under a launcher that restarts all

LAUNCHED = """
import os, pathlib, sys, time
import telegrad.rpc as rpc
from telegrad import errors

folder = pathlib.Path(sys.argv[1])
options = rpc.TelegradOptions(rpc_timeout=60)
rpc.init_rpc(f"w{os.environ['RANK']}", min_workers=1, max_workers=4, rpc_backend_options=options)
now = rpc.generation()
assert (now.rank, now.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
(folder / f"{os.environ['GROUP_RANK']}-{now.number}-{now.rank}-{now.size}").touch()
wanted = int(sys.argv[2])
crashed = folder / "crashed"
for step in range(1000):
    now = rpc.rendezvous_again()
    if wanted == now.size and step > 20 and (crashed.exists() or len(sys.argv) < 4):
        break
    if len(sys.argv) > 3 and now.rank == 1 and step == 10 and not crashed.exists():
        crashed.touch()
        os._exit(1)
    for worker in rpc.workers():
        try:
            rpc.rpc_sync(worker, abs, (-1,))
        except errors.PeerError:
            pass
    time.sleep(0.02)
else:
    raise SystemExit("the others did not come")
rpc.shutdown()
"""


def torchrun(script: pathlib.Path, *arguments: str, nodes: str, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=2"]
    command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one"]
    command += ["--rdzv-conf=last_call_timeout=2,join_timeout=60", "--monitor-interval=0.2"]
    # Otherwise, the agents of torch 2.13 do not tell a later node the address of the store on the first node.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(nodes != "1"))}
    return subprocess.Popen(
        [*command, str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_workers_that_torchrun_restarts_form_a_group_again(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    process = torchrun(script, str(tmp_path), "2", "crash", nodes="1", port=free_port())
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert {path.name for path in tmp_path.glob("0-*")} == {f"0-{life}-{rank}-2" for life in (1, 2) for rank in (0, 1)}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_another_node_joins_under_torchrun(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    port = free_port()
    first = torchrun(script, str(tmp_path), "4", nodes="1:2", port=port)
    wait_until(lambda: list(tmp_path.glob("0-*-0-2")))
    second = torchrun(script, str(tmp_path), "4", nodes="1:2", port=port)
    outs = [each.communicate(timeout=200)[0] for each in (first, second)]
    assert [each.returncode for each in (first, second)] == [0, 0], outs
    assert {path.name.split("-")[-1] for path in tmp_path.glob("?-*")} == {"2", "4"}


# A worker that is stopped for longer than `silence`, and resumes


SILENCE = 1.0


def train_with_silence(place: str, name: str, folder: str, least: int) -> tuple[Any, ...]:
    """Make steps in a group that waits for other workers for far longer than the test does."""
    sealed_store.ANSWER = SILENCE
    times = {"rpc_timeout": 10 * PATIENCE, "silence": SILENCE, "heartbeat": SILENCE}
    return train(place, name, folder, least, 3, rank=int(name.removeprefix("w")), **times)


@pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc that a process is stopped")
@pytest.mark.parametrize(("least", "rank"), [pytest.param(2, 2, marks=pytest.mark.nightly), (3, 0), (3, 2)])
def test_the_others_go_on_without_a_stopped_worker_and_it_comes_back(
    tcp: str, tmp_path: pathlib.Path, rank: int, least: int
) -> None:
    """If the others are too few, they wait in the directory until the stopped worker joins them by itself.

    That worker serves the store, which does not answer either.
    """
    names = [f"w{number}" for number in range(3)]
    others = [name for name in names if name != names[rank]]
    address = ("127.0.0.1", int(tcp.rpartition(":")[2]))
    with processes(3) as made:
        made[rank].begin(train_with_silence, tcp, names[rank], str(tmp_path), least)
        wait_until(lambda: accepts_connections(address, SILENCE))
        for name, process in zip(names, made, strict=True):
            if name in others:
                process.begin(train_with_silence, tcp, name, str(tmp_path), least)
        for name in names:
            wait_for_steps(tmp_path, name, 3, 3)
        made[rank].kill(signal.SIGSTOP)
        wait_until(lambda: any((tmp_path / f"{name}.lost").exists() for name in others))
        for name in others if least == 2 else ():
            wait_for_steps(tmp_path, name, 3, 2)
        made[rank].kill(signal.SIGCONT)
        for name in names:
            wait_for_steps(tmp_path, name, 3, 3)
        found = end(tmp_path, made)
    assert all(state == found[0][0] and is_right(state) for state, _ in found)


# Groups whose directory is killed, with the worker that keeps it and the store, or without


def kill_directory() -> None:
    """Kill the process of the directory, if this worker keeps it."""
    for each in holders:
        keeping = each.found.keeping if each.found is not None else None
        if keeping is not None and keeping._keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeping._keeper.pid, signal.SIGKILL)


holders: list[DirectoryLease] = []  # of this process


def work(place: str, name: str, folder: str, fatal: int = 0, kills: str = "", yields: str = "") -> dict[str, int]:
    """Make steps as `train` does; return the last state.

    `fatal`: this worker dies as soon as it has decided that generation. `kills`: "with" has the directory die with it,
    "often" kills the directory three times. `yields`: this worker comes to a later generation after that event.
    """
    hold, swap = DirectoryLease.hold, EmbeddedDirectory.swap

    def note(self: DirectoryLease, *arguments: Any) -> None:
        hold(self, *arguments)
        holders.append(self)

    def die(self: EmbeddedDirectory, key: str, *arguments: Any) -> Swap:
        last = json.loads(arguments[0])[1][0] if key.startswith(COME) and arguments[0] else 0  # its last generation
        if last and yields:
            wait_until((pathlib.Path(folder) / yields).exists)
        found = swap(self, key, *arguments)
        if key.startswith(COME):
            (pathlib.Path(folder) / f"come {name} {last}").touch()
        if key == GENERATION and found.done and json.loads(arguments[0])[0] == fatal:
            if kills:
                kill_directory()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(DirectoryLease, "hold", note)  # noqa: B010 - a method, to which mypy lets nobody assign
    setattr(EmbeddedDirectory, "swap", die)  # noqa: B010
    if kills == "often":
        threading.Thread(target=kill_often, daemon=True).start()
    state: dict[str, int] = train(place, name, folder, 2, 3)[0]
    return state


def kill_often() -> None:
    for _ in range(3):  # a limited number: on a busy host, the process takes as long to start again
        pause(random.uniform(0.3, 1.5))
        kill_directory()


def records(folder: pathlib.Path) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the records of all workers: numbers, sizes and members of generations."""
    for path in folder.glob("log *"):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def wait_for_generation(folder: pathlib.Path, number: int, size: int) -> None:
    """Wait until a generation of that number, or a later one, has that size."""
    wait_until(lambda: any(each[0] >= number and each[1] == size for each in records(folder)))


def check(folder: pathlib.Path) -> None:
    """Check that there was one generation of each number: all its members have seen the same members."""
    seen: dict[int, set[str]] = {}
    for number, size, lives in records(folder):
        known = seen.setdefault(number, set(lives))
        assert len(known | set(lives)) <= size, f"there were two generations {number}: {known}, {lives}"
        known.update(lives)


def end_and_check(folder: pathlib.Path, made: list[Process]) -> None:
    states = end(folder, made)
    assert all(state == states[0] and is_right(state) for state in states)
    check(folder)


@pytest.mark.parametrize("kills", ["", pytest.param("with", marks=pytest.mark.nightly)])
def test_the_first_worker_dies_once_it_has_formed_a_generation(place: str, tmp_path: pathlib.Path, kills: str) -> None:
    """The first worker serves the store, keeps the directory and decides; the others form the next generation."""
    with processes(4) as made:
        made[0].begin(work, place, "w0", str(tmp_path), 1, kills)
        wait_until((tmp_path / "come w0 0").exists)
        for number, process in enumerate(made[1:3], 1):
            process.begin(work, place, f"w{number}", str(tmp_path))
        assert made[0].join() == -signal.SIGKILL
        wait_for_generation(tmp_path, 2, 2)
        made[3].begin(work, place, "w3", str(tmp_path))
        wait_for_generation(tmp_path, 3, 3)
        end_and_check(tmp_path, made[1:])
    assert {number for number, *_ in records(tmp_path)} == {1, 2, 3}


@pytest.mark.parametrize("kills", [pytest.param("", marks=pytest.mark.nightly), "with"])
def test_the_first_worker_dies_once_it_has_formed_a_later_generation(
    place: str, tmp_path: pathlib.Path, kills: str
) -> None:
    with processes(4) as made:
        made[0].begin(work, place, "w0", str(tmp_path), 2, kills)
        wait_until((tmp_path / "come w0 0").exists)
        for number, process in enumerate(made[1:3], 1):
            process.begin(work, place, f"w{number}", str(tmp_path), 0, "", "come w0 1")  # the first that comes decides
        wait_for_generation(tmp_path, 1, 3)
        made[2].kill()
        assert made[0].join() == -signal.SIGKILL
        made[3].begin(work, place, "w3", str(tmp_path))
        wait_for_generation(tmp_path, 3, 2)
        end_and_check(tmp_path, made[1::2])


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_the_directory_is_killed_again_and_again(place: str, tmp_path: pathlib.Path) -> None:
    with processes(6) as made:
        for number, process in enumerate(made[:3]):
            process.begin(work, place, f"w{number}", str(tmp_path), 0, "often")
        wait_for_generation(tmp_path, 1, 3)
        for number in range(3):
            made[number].kill()
            made[number + 3].begin(work, place, f"w{number}", str(tmp_path), 0, "often")
            wait_for_generation(tmp_path, max(each[0] for each in records(tmp_path)) + 1, 3)
        end_and_check(tmp_path, made[3:])
