"""Versions of tensors that several workers own: readers get whole ones, or the parts that they want."""

import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import checkpoint
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, InvalidArgument, UsageError
from telegrad.ext.calls import call_all
from telegrad.nn import Pipeline, RemoteModule
from telegrad.rpc import RRef, remote, rpc_sync
from telegrad.weights import Box, Publisher, Shard, ShardedPublisher, ShardedSubscriber, Subscriber, sharded_publisher
from telegrad.weights.sharded_publisher import _described
from tests.cluster import PATIENCE, agents_here
from tests.weights.test_weights import on
from tests.weights.trees import published

WHOLE = torch.arange(24.0).view(6, 4)
moment: dict[str, Any] = {"now": 0.0, "cut": 2}  # the value in all parts of a version; where rows of owners begin
broken: set[str] = set()


def rows(first: int, end: int) -> Tensor:
    return (WHOLE + moment["now"])[first:end]


def upper() -> dict[str, Any]:
    return {"w": Shard(rows(0, 2), (0, 0), (6, 4)), "bias": torch.full((3,), moment["now"])}


def lower() -> dict[str, Any]:
    if "lower" in broken:
        raise ValueError("no weights")
    return {"w": Shard(rows(2, 6), (2, 0), (6, 4))}


def first_rows() -> dict[str, Any]:
    return {"w": Shard(WHOLE[: moment["cut"]], (0, 0), (6, 4))}


def last_rows() -> dict[str, Any]:
    return {"w": Shard(WHOLE[moment["cut"] :], (moment["cut"], 0), (6, 4))}


SOURCE = {"w1": upper, "w2": lower}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = RemoteModule("w1", nn.Linear, (3, 3))
        self.second = RemoteModule("w2", nn.Linear, (3, 3))
        self.head = nn.Linear(3, 1)


class Tied(nn.Module):
    """A model whose pipeline has a weight on one worker, and a replica of it on another."""

    def __init__(self) -> None:
        super().__init__()
        stages = [RemoteModule(worker, nn.Linear, (3, 3, False)) for worker in ("w1", "w2")]
        self.pipeline = Pipeline(stages, chunks=1, tied=[("0.weight", "1.weight")])

    def change(self) -> None:
        first: Any = self.pipeline.stages[0]
        rpc_sync("w1", add_one, (first.module_rref,))

    def weights(self) -> list[Tensor]:
        return [stage.state_dict()["weight"] for stage in self.pipeline.stages]


def add_one(linear: RRef[nn.Linear]) -> None:
    with torch.no_grad():
        linear.local_value().weight.add_(1)


@pytest.fixture
def four() -> Iterator[list[Worker]]:
    moment["now"] = 0.0
    broken.clear()
    with agents_here(4) as made:
        yield made


@pytest.mark.parametrize("place", ["w0", "w3"])
def test_replicas_of_tied_weights_have_the_new_value(place: str, four: list[Worker], tmp_path: pathlib.Path) -> None:
    """In published versions and in checkpoints, also if the pipeline is a part of a model on another worker."""
    model, loaded = (remote(place, Tied) for _ in range(2))
    policy = ShardedPublisher("tied", model)
    reader = ShardedSubscriber("w0", "tied")
    for number in range(1, 6):
        model.rpc_sync().change()
        assert policy.publish() == number
        state = reader.at_least(number).state
        assert torch.equal(state["pipeline.stages.0.weight"], state["pipeline.stages.1.weight"])
        model.rpc_sync().change()
        checkpoint.load({"model": loaded}, checkpoint.save({"model": model}, tmp_path / str(number)).wait())
        assert torch.equal(*loaded.rpc_sync().weights())
        assert torch.equal(loaded.rpc_sync().weights()[0], state["pipeline.stages.0.weight"] + 1)


def test_readers_get_the_parts_that_they_want(four: list[Worker]) -> None:
    policy = ShardedPublisher("policy", SOURCE)
    assert policy.publish() == 1
    columns = {"w": Box((0, 1), (6, 2)), "bias": None}
    readers = [on(four[3], ShardedSubscriber, "w0", "policy", wanted) for wanted in (None, columns, ["bias"])]
    for number in (1, 2, 3):
        whole, part, bias = (on(four[3], reader.at_least, number) for reader in readers)
        assert whole.number == part.number == bias.number == policy.version == number
        assert torch.equal(whole.state["w"], WHOLE + moment["now"])
        assert torch.equal(part.state["w"], (WHOLE + moment["now"])[:, 1:3])
        assert [*bias.state] == ["bias"]
        assert bias.state["bias"].tolist() == [moment["now"]] * 3
        assert on(four[3], readers[0].newest) is whole
        moment["now"] += 100
        policy.publish()
    assert [*readers[2]._owners] == ["w1"]  # the other owner is not asked
    assert on(four[3], readers[1].at_least, 4).number == 4
    assert on(four[3], readers[1].refresh).number == 4


def test_a_wanted_part_that_an_owner_has_is_not_copied(four: list[Worker]) -> None:
    policy = ShardedPublisher("policy", SOURCE)
    policy.publish()
    reader = on(four[3], ShardedSubscriber, "w0", "policy", {"w": Box((2, 0), (4, 4))})
    version = on(four[3], reader.newest)
    assert version.state["w"].data_ptr() == reader._owners["w2"].newest().state["0"].data_ptr()


def test_a_model_with_parts_on_other_workers(four: list[Worker]) -> None:
    model = Model()
    policy = ShardedPublisher("policy", model, dtype=torch.bfloat16)
    policy.publish(wait=None)
    reader = on(four[3], ShardedSubscriber, "w0", "policy")
    state = model.state_dict()
    version = on(four[3], reader.newest)
    assert version.state.keys() == state.keys()
    assert all(torch.equal(version.state[name], value.bfloat16()) for name, value in state.items())
    local = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3), "head": nn.Linear(3, 1)})
    version.load_into(local)
    assert torch.equal(local.state_dict()["second.weight"], state["second.weight"].bfloat16().float())


def test_a_version_is_available_once_all_owners_have_published(four: list[Worker]) -> None:
    policy = ShardedPublisher("policy", SOURCE)
    broken.add("lower")
    with pytest.raises(ValueError, match="no weights"):
        policy.publish()
    assert policy.version == 0
    broken.clear()
    assert policy.publish() == 1
    reader = on(four[3], ShardedSubscriber, "w0", "policy")
    assert on(four[3], reader.newest).number == 1
    broken.add("lower")
    moment["now"] = 100
    with pytest.raises(ValueError, match="no weights"):
        policy.publish()
    fresh = on(four[2], ShardedSubscriber, "w0", "policy")
    for version in (on(four[3], reader.refresh), on(four[2], fresh.newest)):
        assert version.number == 1
        assert torch.equal(version.state["w"], WHOLE)
    broken.clear()
    moment["now"] = 200
    assert policy.publish() == 2
    version = on(four[3], reader.at_least, 2)
    assert torch.equal(version.state["w"], WHOLE + 200)
    assert version.state["bias"].tolist() == [200] * 3


def test_owned_parts_may_change_while_another_thread_reads(four: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    after = Subscriber._after

    def read_later_version(subscriber: Subscriber, *args: Any) -> Any:
        part = after(subscriber, *args)
        if subscriber.worker == "w2" and moment["cut"] == 1:
            moment["cut"] = 5
            on(four[0], policy.publish)
            assert torch.equal(on(four[3], reader.at_least, 2).state["w"], WHOLE)
        return part

    moment["cut"] = 1
    policy = ShardedPublisher("policy", {"w1": first_rows, "w2": last_rows})
    policy.publish()
    reader = on(four[3], ShardedSubscriber, "w0", "policy")
    monkeypatch.setattr(Subscriber, "_after", read_later_version)
    assert torch.equal(on(four[3], reader.at_least, 1).state["w"], WHOLE)
    assert moment["cut"] == 5


def test_a_reader_never_sees_a_mix_of_versions(four: list[Worker]) -> None:
    policy = ShardedPublisher("policy", SOURCE)
    policy.publish()
    readers = [on(four[3], ShardedSubscriber, "w0", "policy") for _ in range(2)]
    seen: list[set[float]] = [set(), set()]
    reached = [threading.Semaphore(0), threading.Semaphore(0)]

    def read(index: int) -> None:
        current.enter(four[3])
        while (version := readers[index].refresh()).number < 40:
            shown = {*(version.state["w"] - WHOLE).unique().tolist(), *version.state["bias"].tolist()}
            assert len(shown) == 1, shown
            assert shown == {float(version.number - 1)}
            if not shown <= seen[index]:
                seen[index] |= shown
                reached[index].release()

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read, index) for index in range(2)]
        for number in range(39):
            moment["now"] += 1
            policy.publish()
            if number % 8 == 0:  # without pauses, no reader could follow
                assert all(each.acquire(timeout=PATIENCE) for each in reached)
        for each in reading:
            each.result(PATIENCE)


def test_an_owner_may_be_called_again_while_it_publishes(four: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the driver gave up may still run when the next one arrives."""
    later: list[Any] = []

    def described(name: str, value: Any) -> Any:
        found = _described(name, value)
        if not later:
            later.append(True)
            moment["now"] = 7.0
            owner.prepare(2)
        return found

    owner = on(four[1], sharded_publisher.ShardOwner, "parts", upper, None, "fast")
    monkeypatch.setattr(sharded_publisher, "_described", described)
    owner.prepare(1)
    with pytest.raises(UsageError, match="a later call"):
        owner.publish(1, 0)
    assert owner.publish(2, 0)[0] == 1
    assert on(four[3], Subscriber, "w1", "parts").newest().state["1"].tolist() == [7.0] * 3


def test_threads_that_publish_at_once_take_turns(four: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the newest contents could name versions that the owners have dropped."""
    over = threading.Event()

    def second() -> int:
        number = on(four[0], policy.publish)
        over.set()
        return number

    def called(*args: Any) -> Any:
        monkeypatch.setattr(sharded_publisher, "call_all", call_all)
        found = call_all(*args)
        numbers.append(pool.submit(second))
        over.wait(0.2)  # without a lock, the other thread would publish now
        return found

    policy = ShardedPublisher("policy", SOURCE)
    numbers: list[Future[int]] = []
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(sharded_publisher, "call_all", called)
        assert policy.publish() == 1
        assert numbers[0].result(PATIENCE) == 2
    reader = on(four[3], sharded_publisher.ManifestSubscriber, "w0", "policy")
    assert reader.newest().state["numbers"].tolist() == [2, 2]


def test_mistakes_of_readers_and_owners_are_named(four: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="from each worker's name to a function"):
        ShardedPublisher("p", {"w1": torch.ones(3)})
    for value in (3, Shard(3, (0, 0), (6, 4))):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'step' cannot be published in parts: it is not a tensor, but int"):
            ShardedPublisher(f"{value}", {"w1": lambda value=value: {"step": value}}).publish()
    for place in ((0.5, 0), (True, 0), ("a", 0), None, 0):
        for at, shape in ((place, (6, 4)), ((2, 0), place)):
            with pytest.raises(InvalidArgument, match=r"'w' is not a part of a tensor of shape .*: its offsets are"):
                ShardedPublisher(
                    f"{at} {shape}", {"w1": lambda own=(at, shape): {"w": Shard(rows(2, 6), *own)}}
                ).publish()
    with pytest.raises(InvalidArgument, match="the result of a function in source must be a dictionary of tensors"):
        ShardedPublisher("tensor", {"w1": lambda: torch.ones(3)}).publish()
    with pytest.raises(InvalidArgument, match=r"dtype must be a type of floating numbers.* not 'torch\.int64'"):
        ShardedPublisher("rounded", {"w1": upper}, torch.int64)
    plain = Publisher("plain", {"w": torch.ones(3)})
    plain.publish()
    with pytest.raises(UsageError, match="'plain' on worker 'w0' is a Publisher: read it by a Subscriber"):
        on(four[3], ShardedSubscriber, "w0", "plain")
    policy = ShardedPublisher("policy", SOURCE)
    policy.publish()
    with pytest.raises(UsageError, match="'policy' on worker 'w0' is a ShardedPublisher: read it by a Sharded"):
        on(four[3], Subscriber, "w0", "policy")
    other = ShardedPublisher("other", {"w1": upper, "w2": lambda: {"w": Shard(rows(2, 6), (2, 0), (7, 4))}})
    # No owner is asked, whose failure would be reported later.
    monkeypatch.setattr(sharded_publisher, "remote", None)
    with pytest.raises(UsageError, match="worker 'w0' has a publisher 'policy' already"):
        ShardedPublisher("policy", SOURCE)
    boxes: Any = ((0, 0), (7, 4)), ((0.5, 0), (1, 1)), ((True, 0), (1, 1)), (None, (1, 1)), ((0, 0), 1)
    wrongs = [*((Box(*box), r"is not within its shape \(6, 4\)") for box in boxes), ((0, 2), "a Box or None")]
    for wrong, text in wrongs:
        wanted: Any = {"w": wrong}
        with pytest.raises(UsageError, match=text):
            on(four[3], lambda wanted=wanted: ShardedSubscriber("w0", "policy", wanted).newest())
    other.publish()
    with pytest.raises(UsageError, match=r"owners publish 'w' with the shapes \(6, 4\) and \(7, 4\)"):
        on(four[3], lambda: ShardedSubscriber("w0", "other").newest())


def test_a_part_without_an_owner_is_an_error(four: list[Worker]) -> None:
    policy = ShardedPublisher("policy", {"w1": upper})
    policy.publish()
    with pytest.raises(UsageError, match="no workers hold all of 'w': the part at offsets \\(2, 0\\)"):
        on(four[3], lambda: ShardedSubscriber("w0", "policy").newest())
    reader = on(four[3], ShardedSubscriber, "w0", "policy", ["bias"])
    with pytest.raises(CallTimeout):
        on(four[3], reader.at_least, 2, timeout=0.2)
    reader.close()
    four[1].end("")
    policy.close()  # although its owner is gone
    assert "at version 1" in repr(policy)
    assert "at version 0" in repr(reader)


def test_distributed_tensors_of_torch() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Partial
    from torch.distributed.tensor.placement_types import Shard as Cut
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", range(4))
        value = DTensor.from_local(torch.ones(2, 5), mesh, [Cut(0)], run_check=False)
        content, tensor = _described("w", value)
        with pytest.raises(InvalidArgument, match="'w' has partial placements"):
            _described("w", DTensor.from_local(torch.ones(2, 5), mesh, [Partial()], run_check=False))
        with pytest.raises(InvalidArgument, match="'w' is a DTensor, and this worker has only a part of it"):
            published({"w": value})
        module = nn.Module()
        module.w = nn.Parameter(value)
        for way in ("load_into", "swap_into"):
            with pytest.raises(InvalidArgument, match="'w' here is a DTensor"):
                getattr(published({"w": torch.ones(8, 5)}), way)(module)
    finally:
        torch.distributed.destroy_process_group()
    assert (content.part.box, content.shape, type(tensor)) == (Box((4, 0), (2, 5)), (8, 5), Tensor)
