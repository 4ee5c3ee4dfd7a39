"""Checkpoints that are written in the background, their versions, and the state after a kill."""

import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.storage import WriteResult

import telegrad.checkpoint as checkpoint
import telegrad.rpc as rpc
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.checkpoint import Copies, HostMemoryPool, Saver, folders
from telegrad.errors import CallTimeout, CheckpointFailed, InvalidArgument, WorkersFailed
from telegrad.nn import RemoteModule
from tests.cluster import PATIENCE, agents_here, group, in_background, pause, wait_until

SIZE = 1 << 16  # elements in each part of the saved model


class Gate:
    """Blocks every writer until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.come = threading.Semaphore(0)
        self.error: Exception | None = None
        write = Saver.write

        def held(saver: Saver, plan: dcp.SavePlan) -> list[WriteResult]:
            self.come.release()
            assert self.open.wait(PATIENCE)
            if self.error is not None:
                raise self.error
            return write(saver, plan)

        monkeypatch.setattr(Saver, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with agents_here(3, num_worker_threads=1) as made:
        yield made


def model() -> nn.Module:
    return nn.ModuleList(
        [RemoteModule("w1", nn.Linear, (4, 4)), RemoteModule("w2", nn.Linear, (4, 4)), nn.Linear(4, 4)]
    )


def fill(module: nn.Module, value: float) -> None:
    module.load_state_dict({name: torch.full_like(part, value) for name, part in module.state_dict().items()})


def values(module: nn.Module) -> set[float]:
    return {float(each) for part in module.state_dict().values() for each in part.flatten()}


def test_a_checkpoint_has_the_values_of_its_start_while_training_goes_on(
    workers: list[Worker], gate: Gate, tmp_path: pathlib.Path
) -> None:
    net = model()
    fill(net, 1.0)
    future = checkpoint.save({"model": net, "step": [1]}, tmp_path / "one", wait=False)
    for _ in workers:
        assert gate.come.acquire(timeout=PATIENCE)
    fill(net, 2.0)  # although the only thread for calls of each worker writes
    assert values(net) == {2.0}
    assert not future.done()
    assert checkpoint.latest(tmp_path) is None
    gate.open.set()
    assert future.wait() == str(tmp_path / "one") == checkpoint.latest(tmp_path)
    state = {"model": net, "step": [0]}
    checkpoint.load(state, tmp_path / "one")
    assert values(net) == {1.0}
    assert state["step"] == [1]


def test_checkpoints_are_written_one_at_a_time(workers: list[Worker], gate: Gate, tmp_path: pathlib.Path) -> None:
    net = model()
    first = checkpoint.save({"model": net}, tmp_path / "one", wait=False)
    over = threading.Event()

    def again() -> None:
        current.enter(workers[0])
        checkpoint.save({"model": net}, tmp_path / "two", wait=False).wait()
        over.set()

    with in_background(again):
        for _ in workers:
            assert gate.come.acquire(timeout=PATIENCE)
        assert not gate.come.acquire(timeout=0.1)  # the second save waits for the first
        gate.open.set()
        assert over.wait(PATIENCE)
    assert first.done()
    assert checkpoint.latest(tmp_path) == str(tmp_path / "two")


def test_a_failure_is_raised_by_the_future_or_the_next_save(
    workers: list[Worker], gate: Gate, tmp_path: pathlib.Path
) -> None:
    net = model()
    gate.open.set()
    checkpoint.save({"model": net}, tmp_path / "good", wait=False).wait()
    gate.error = OSError("no space")
    unseen = checkpoint.save({"model": net}, tmp_path / "bad", wait=False)
    with pytest.raises(CheckpointFailed, match=r"nothing was saved.*'.*bad'.*: OSError: no space.*\. Fix the cause"):
        checkpoint.save({"model": net}, tmp_path / "next", wait=False)
    assert not (tmp_path / "bad").exists()
    del unseen
    seen = checkpoint.save({"model": net}, tmp_path / "bad", wait=False)
    with pytest.raises(Exception, match="no space"):
        seen.wait()
    gate.error = None
    checkpoint.save({"model": net}, tmp_path / "next", wait=False).wait()
    assert {path.name for path in tmp_path.iterdir()} == {"good", "next"}


def test_a_callback_may_save_again(workers: list[Worker], tmp_path: pathlib.Path) -> None:
    over = threading.Event()

    def again(_: Any) -> None:
        checkpoint.save({"step": 2}, tmp_path / "two")
        over.set()

    checkpoint.save({"step": 1}, tmp_path / "one", wait=False).add_done_callback(again)
    assert over.wait(PATIENCE)


def test_versions(workers: list[Worker], tmp_path: pathlib.Path) -> None:
    assert checkpoint.latest(tmp_path / "never") is None
    for step in (1, 2, 10):
        checkpoint.save({"step": step}, tmp_path / str(step), keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"2", "10"}
    in_a_day = time.time() + 86400
    os.utime(tmp_path / "10" / folders.CONTENTS, (in_a_day, in_a_day))  # as if the clock had been set back since
    checkpoint.save({"step": 5}, tmp_path / "5", keep=2)  # as if training had resumed from an older one
    assert checkpoint.latest(tmp_path) == str(tmp_path / "5")
    assert {path.name for path in tmp_path.iterdir()} == {"10", "5"}
    checkpoint.save({"step": 6}, tmp_path / "10")
    assert checkpoint.latest(tmp_path) == checkpoint.latest(tmp_path / "10") == str(tmp_path / "10")
    for wrong in (0, -1, "3"):
        with pytest.raises(InvalidArgument, match="keep must be a number of checkpoints"):
            checkpoint.save({"step": 7}, tmp_path / "7", keep=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["1", "{folder}/1", "1/.metadata"])
def test_the_target_of_a_symlink_beside_stays(workers: list[Worker], tmp_path: pathlib.Path, target: str) -> None:
    checkpoint.save({"step": 1}, tmp_path / "1")
    link = tmp_path / "link"
    link.symlink_to(target.format(folder=tmp_path))
    if link.is_dir():
        checkpoint.save({"step": 2}, link)
    for step in (3, 4):
        checkpoint.save({"step": step}, tmp_path / str(step), keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "link", "4"}
    assert link.exists()
    assert checkpoint.latest(tmp_path / "1")


def test_only_files_of_killed_saves_are_removed(workers: list[Worker], tmp_path: pathlib.Path) -> None:
    data = f"{'0123abcd' * 2}__0_0.distcp"
    foreign = {  # files of other programs: of torch, incomplete ones of torch, or no checkpoints
        "torch": ["__0_0.distcp", ".metadata"],
        "begun": ["__0_0.distcp", ".metadata.tmp"],
        "over": ["__0_0.distcp", data, ".metadata"],
        "table": [".metadata"],
        "notes": ["notes.tmp"],
    }
    for name, files in {
        "killed": [data, f".metadata.{'0123abcd' * 2}.tmp"],
        "linked": [data],
        "mine": [data, "notes.txt"],
        "empty": [],
        **foreign,
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "link").symlink_to("linked")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.utime(path, (time.time() - 60,) * 2, follow_symlinks=False)
    checkpoint.save({"step": 1}, tmp_path / "1")
    (tmp_path / "1" / "settings.toml").write_text("")
    os.mkfifo(tmp_path / "1" / "pipe")
    checkpoint.save({"step": 2}, tmp_path / "2", keep=1)
    stay = {"1", "2", "link", "linked", "loop", "mine", "empty", "notes.txt", *foreign}
    assert {path.name for path in tmp_path.iterdir()} == stay
    for name, files in foreign.items():
        assert {path.name for path in (tmp_path / name).iterdir()} == set(files)
    assert {path.name for path in (tmp_path / "1").iterdir()} == {"settings.toml", "pipe"}
    assert checkpoint.latest(tmp_path) == str(tmp_path / "2")
    checkpoint.save({"step": 3}, tmp_path / "torch")
    assert (tmp_path / "torch" / "__0_0.distcp").exists()


def test_copies_keep_shared_memory_shared_and_reuse_their_memory() -> None:
    shelf = HostMemoryPool(None)
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"a": whole, "b": {"again": whole, "part": whole[:, 1]}, "c": [1, (whole.to_sparse(), {2})], "d": whole.t()}
    copies = Copies(shelf, lambda: None)
    copied = copies.of(state)
    pointers = {each.data_ptr() for each in (copied["a"], copied["b"]["part"], copied["d"])}
    whole.add_(1)
    assert copied["a"] is copied["b"]["again"]
    assert torch.equal(copied["a"] + 1, whole)
    assert torch.equal(copied["b"]["part"] + 1, whole[:, 1])
    assert torch.equal(copied["d"] + 1, whole.t())
    assert torch.equal(copied["c"][1][0].to_dense() + 1, whole)
    numbers = torch.tensor([1 + 2j])
    copied = copies.of([numbers, numbers.conj(), numbers.imag, numbers.conj().imag])
    assert [each.tolist() for each in copied] == [[1 + 2j], [1 - 2j], [2.0], [-2.0]]
    for number in range(100):  # tensors at one address, each of which is gone when the next one is made
        assert copies.of([torch.full((1000,), number)])[0][0] == number
    copies.give_back()
    again = Copies(shelf, lambda: None).of(state)
    assert {each.data_ptr() for each in (again["a"], again["b"]["part"], again["d"])} == pointers


# The state after a kill


class Counted(nn.Module):
    """Every element of it is the number of the step."""

    number: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(SIZE))

    def count(self, step: int) -> None:
        self.number.fill_(step)

    def grow(self, times: int) -> None:
        self.number = self.number.repeat(times)

    def counted(self) -> float:
        return float(self.number.max())


def save_on_and_on(folder: pathlib.Path, owners: list[str]) -> None:
    parts = [RemoteModule(owner, Counted) for owner in owners]
    state: dict[str, Any] = {"model": nn.ModuleList(parts), "step": 0}
    if (found := checkpoint.latest(folder)) is not None:
        checkpoint.load(state, found)
    while True:
        state["step"] += 1
        for part in parts:
            part.module_rref.rpc_sync().count(state["step"])
        checkpoint.save(state, folder / f"{state['step']}", wait=state["step"] % 5 == 0, keep=2)


def read(path: str) -> tuple[int, set[float]]:
    """Return the step and the values that torch reads from a checkpoint, without any worker."""
    state: dict[str, Any] = {f"model.{part}.number": torch.zeros(SIZE) for part in range(2)} | {"step": 0}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state.pop("step"), {float(end) for part in state.values() for end in part.aminmax()}


def newest(folder: pathlib.Path) -> int:
    found = checkpoint.latest(folder)
    return int(pathlib.Path(found).name) if found else 0


def kill_at_random(folder: pathlib.Path, seed: int, times: int, owners: list[str]) -> None:
    """Kill the driver, an owner or all of them during saves; check the last complete checkpoint each time."""
    count = 1 + max(int(name.removeprefix("worker")) for name in owners)
    ways = [[0], [1], list(range(count))] if count > 1 else [[0]]
    chance = random.Random(seed)
    before = 0
    for _ in range(times):
        with group(count) as workers:
            workers[0].begin(save_on_and_on, folder, owners)
            wait_until(lambda before=before: newest(folder) > before)  # type: ignore[misc]
            pause(chance.random() * 0.1)
            victims = chance.choice(ways)
            for victim in victims:
                workers[victim].kill()
            if victims == [1]:
                with pytest.raises(AssertionError, match="worker1"):
                    workers[0].end()
        found = checkpoint.latest(folder)
        assert found is not None
        step, seen = read(found)
        assert seen == {float(step)}, f"SEED={seed}"
        assert step >= before, f"SEED={seed}"
        before = step


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_last_complete_checkpoint_is_found_after_kills(tmp_path: pathlib.Path) -> None:
    kill_at_random(tmp_path, int(os.environ.get("TELEGRAD_SEED", "1")), 3, ["worker0", "worker0"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_last_complete_checkpoint_is_found_after_many_kills(tmp_path: pathlib.Path) -> None:
    kill_at_random(
        tmp_path, int(os.environ.get("TELEGRAD_SEED", str(random.randrange(1 << 32)))), 50, ["worker1", "worker2"]
    )


def save_and_leave(folder: pathlib.Path) -> None:
    if rpc.get_worker_info().id == 0:
        net = RemoteModule("worker1", Counted)
        checkpoint.save({"model": net, "step": 1}, folder / "1", wait=False)
    rpc.shutdown()


def test_shutdown_waits_for_a_checkpoint(tmp_path: pathlib.Path) -> None:
    with group(2) as workers:
        for worker in workers:
            worker.begin(save_and_leave, tmp_path)
        for worker in workers:
            worker.end()
    assert checkpoint.latest(tmp_path) == str(tmp_path / "1")


@pytest.mark.parametrize("wait", [False, True])
def test_saves_of_several_threads_take_turns(workers: list[Worker], tmp_path: pathlib.Path, wait: bool) -> None:
    state = {"model": model()}
    with ThreadPoolExecutor(3, initializer=current.enter, initargs=(workers[0],)) as pool:
        for save in [pool.submit(checkpoint.save, state, tmp_path, wait=wait) for _ in range(3)]:
            save.result().wait()
    checkpoint.load(state, tmp_path)


# Owners without progress

LIMIT = 1.0  # seconds without progress


def hurry(limit: float = LIMIT) -> None:
    current.agent().timeout = limit


@pytest.fixture
def hurried(workers: list[Worker]) -> None:
    hurry()


@pytest.mark.nightly
@pytest.mark.usefixtures("hurried")
def test_saving_does_not_wait_for_a_hanging_owner(gate: Gate, tmp_path: pathlib.Path) -> None:
    net = model()
    with pytest.raises(WorkersFailed, match=r"CallTimeout: worker 'w1' made no progress for 1 s .*`rpc_timeout`"):
        checkpoint.save({"model": net}, tmp_path / "one")
    checkpoint.save({"model": net}, tmp_path / "one", wait=False)
    with pytest.raises(CheckpointFailed, match=r"made no progress"):
        checkpoint.save({"model": net}, tmp_path / "two", wait=False)
    gate.open.set()
    saved = checkpoint.save({"model": net}, tmp_path / "two").wait()
    assert checkpoint.latest(tmp_path) == saved


@pytest.mark.usefixtures("hurried")
def test_saving_waits_for_a_slow_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    write = folders._InSteps.write
    monkeypatch.setattr(folders, "STEP", SIZE)

    def slow(file: folders._InSteps, data: bytes) -> int:
        time.sleep(LIMIT / 20)
        return write(file, data)

    monkeypatch.setattr(folders._InSteps, "write", slow)
    net = RemoteModule("w1", Counted)
    net.module_rref.rpc_sync().grow(16)
    began = time.monotonic()
    saved = checkpoint.save({"model": net}, tmp_path / "one").wait()
    assert time.monotonic() - began > 2 * LIMIT
    net.module_rref.rpc_sync().count(1)
    checkpoint.load({"model": net}, saved)
    assert net.module_rref.rpc_sync().counted() == 0


class Stopping(Counted):
    """A part whose process is stopped at each save and load, from the second one on."""

    def get_extra_state(self) -> int:
        return self.stop()

    def set_extra_state(self, _: int) -> None:
        self.stop()

    def stop(self) -> int:
        self.times = getattr(self, "times", 0) + 1
        if self.times > 1:
            signal.raise_signal(signal.SIGSTOP)
        return 0


def prepare(folder: pathlib.Path) -> None:
    kept["model"] = RemoteModule("worker1", Stopping)
    checkpoint.save(kept, folder / "1")
    hurry(0.4)  # all later saves and loads fail


def outcome(act: Callable[..., Any], folder: pathlib.Path) -> str:
    with pytest.raises(CallTimeout) as caught:
        act(kept, folder)
    return str(caught.value)


kept: dict[str, Any] = {}  # the state that the driver saves


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped")
def test_saving_and_loading_do_not_wait_for_a_stopped_owner(tmp_path: pathlib.Path) -> None:
    with group(2, silence=0) as workers:
        workers[0].run(prepare, tmp_path)
        said = [workers[0].run(outcome, checkpoint.save, tmp_path / "2")]
        workers[1].kill(signal.SIGCONT)
        said += [workers[0].run(outcome, partial(checkpoint.save, wait=False), tmp_path / "2")]
        workers[1].kill(signal.SIGCONT)
        said += [workers[0].run(outcome, checkpoint.load, tmp_path / "1")]
        assert [each.partition(" for ")[0] for each in said] == ["worker 'worker1' made no progress"] * 3
        workers[1].kill()
