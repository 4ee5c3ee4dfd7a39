"""TorchRL's collectors get the weights that a trainer publishes. Needs TorchRL: pip install 'telegrad[torchrl]'."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchrl")

from telegrad.errors import UsageError
from telegrad.rpc import remote
from telegrad.weights.torchrl import TelegradWeightSyncScheme
from tests.cluster import free_port

pytestmark = pytest.mark.nightly

PROGRAM = '''
import sys

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs import PendulumEnv

from telegrad.weights.torchrl import TelegradWeightSyncScheme

class Policy(nn.Module):
    """Acts as its weight says, so that data show which weights made them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, th):
        return self.weight + 0 * th.unsqueeze(-1)

if __name__ == "__main__":
    policy = TensorDictModule(Policy(), in_keys=["th"], out_keys=["action"])
    collector = RPCCollector(
        [PendulumEnv, PendulumEnv],
        policy,
        frames_per_batch=20,
        total_frames=120,
        sync=True,
        launcher="mp",
        tcp_port=sys.argv[1],
        weight_sync_schemes={"policy": TelegradWeightSyncScheme()},
    )
    seen = []
    for number, data in enumerate(collector, 1):
        seen.append(sorted({round(value, 3) for value in data["action"].flatten().tolist()}))
        with torch.no_grad():
            policy.module.weight.fill_(number / 10)
        collector.update_policy_weights_()
    collector.shutdown()
    print("SEEN", seen)
'''


class Collector:
    def __init__(self) -> None:
        self.policy = nn.Linear(3, 2)
        self.schemes: dict[str, Any] = {}
        self.cascaded: list[Any] = []

    def register(self, scheme: Any) -> None:
        scheme.init_on_receiver(model_id="policy", context=self, worker_idx=0)
        scheme.connect(worker_idx=0)
        self.schemes["policy"] = scheme

    def _receive_weights_scheme(self) -> None:
        for scheme in self.schemes.values():
            scheme.receive()

    def update_policy_weights_(self, model_id: str, policy_or_weights: Any) -> None:
        self.cascaded.append(policy_or_weights)


class Trainer:
    def __init__(self) -> None:
        self.policy = nn.Linear(3, 2)
        self.collector_rrefs = [remote(worker, Collector) for worker in ("w1", "w2")]


@pytest.fixture
def trainer(here: None) -> Trainer:
    return Trainer()


def begin(trainer: Trainer, **options: Any) -> Any:
    scheme = TelegradWeightSyncScheme(**options)
    for collector in trainer.collector_rrefs:
        collector.rpc_sync().register(pickle.loads(pickle.dumps(scheme)))
    scheme.init_on_sender(model_id="policy", context=trainer, num_workers=2)
    scheme.connect()
    return scheme


def weight(collector: Any) -> torch.Tensor:
    return collector.to_here().policy.weight


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_collectors_have_the_weights_after_send(trainer: Trainer, strategy: str) -> None:
    scheme = begin(trainer, strategy=strategy)
    for value in (1.0, 2.0):
        nn.init.constant_(trainer.policy.weight, value)
        scheme.send()
        assert [weight(each).unique().tolist() for each in trainer.collector_rrefs] == [[value], [value]]
    nn.init.constant_(trainer.policy.weight, 3.0)
    scheme.send(worker_ids=[1])
    assert [weight(each).unique().tolist() for each in trainer.collector_rrefs] == [[2.0], [3.0]]
    cascaded = [each.to_here().cascaded for each in trainer.collector_rrefs]
    assert [len(each) for each in cascaded] == [2, 3]
    assert cascaded[1][-1]["weight"].unique().tolist() == [3.0]
    scheme.shutdown()
    with pytest.raises(UsageError, match="shut down"):
        scheme.send()


def test_send_takes_weights(trainer: Trainer) -> None:
    scheme = begin(trainer)
    scheme.send(nn.utils.skip_init(nn.Linear, 3, 2).requires_grad_(False).apply(lambda it: nn.init.ones_(it.weight)))
    assert weight(trainer.collector_rrefs[0]).unique().tolist() == [1.0]
    scheme.send({"weight": torch.full((2, 3), 5.0), "bias": torch.zeros(2)})
    assert weight(trainer.collector_rrefs[1]).unique().tolist() == [5.0]


def test_a_context_without_remote_collectors_is_refused() -> None:
    with pytest.raises(UsageError, match="collector_rrefs"):
        TelegradWeightSyncScheme().init_on_sender(model_id="policy", context=nn.Linear(1, 1), num_workers=1)


def test_the_scheme_replaces_that_of_torch_rpc(tmp_path: Any) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "telegrad", str(program), str(free_port())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "SEEN [[0.0], [0.1], [0.2], [0.3], [0.4], [0.5]]" in ran.stdout, ran.stdout + ran.stderr
