"""An instance of each public class, and arguments for public functions, for tests that go through all of them."""

import inspect
import os
from typing import Any

import torch
from torch import nn

import telegrad
from telegrad import autograd, insight, optim, rpc, weights


class Things:
    """Instances and plausible arguments in a group of a driver and the worker "worker0"."""

    def __init__(self, local: Any) -> None:
        self.module = telegrad.nn.RemoteModule("worker0", nn.Linear, (2, 1))
        self.reference = rpc.remote("worker0", list, ([1, 2],))
        self.context = autograd.context()
        self.context_id = self.context.__enter__()
        self.pipeline = telegrad.nn.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], chunks=1)
        self.optimizer = optim.DistributedOptimizer.for_module(torch.optim.SGD, self.module, lr=0.1)
        self.publisher = weights.Publisher("numbers", {"x": torch.ones(2)})
        self.publisher.publish()
        self.sharded = weights.ShardedPublisher("shards", self.module)
        self.sharded.publish()
        self.subscriber = weights.Subscriber("driver", "numbers")
        self.instances: dict[str, Any] = {
            "telegrad.launch.local.LocalGroup": local,
            "telegrad.rpc.Future": rpc.rpc_async("worker0", int),
            "telegrad.rpc.Group": rpc.group(["worker0"]),
            "telegrad.rpc.GroupFuture": rpc.group(["worker0"]).rpc_async(int),
            "telegrad.rpc.RefGroup": rpc.group(["worker0"]).remote(list, ([1],)),
            "telegrad.rpc.RRef": self.reference,
            "telegrad.rpc.TelegradOptions": rpc.TelegradOptions(),
            "telegrad.rpc.TensorPipeRpcBackendOptions": rpc.TensorPipeRpcBackendOptions(),
            "telegrad.nn.RemoteModule": self.module,
            "telegrad.nn.Pipeline": self.pipeline,
            "telegrad.optim.DistributedOptimizer": self.optimizer,
            "telegrad.weights.Publisher": self.publisher,
            "telegrad.weights.ShardedPublisher": self.sharded,
            "telegrad.weights.Subscriber": self.subscriber,
            "telegrad.weights.ShardedSubscriber": weights.ShardedSubscriber("driver", "shards"),
            "telegrad.weights.Version": self.subscriber.newest(),
            "telegrad.insight.GradientGraph": insight.graph(self.context_id),
        }
        root = torch.ones(1, requires_grad=True) * 2
        self.right: dict[str, Any] = {
            **dict.fromkeys(("to", "worker", "remote_device"), "worker0"),
            **dict.fromkeys(("func", "fn", "factory"), int),
            **dict.fromkeys(("callback", "keep", "op"), repr),
            **dict.fromkeys(("max_size", "number", "stage", "n", "wanted", "chunks"), 1),
            **dict.fromkeys(("max_wait", "max_norm", "seconds"), 0.0),
            **dict.fromkeys(("path", "folder", "checkpoint_id"), os.devnull),
            **dict.fromkeys(("module", "model"), nn.Linear(2, 1)),
            "name": "another",
            "method": "copy",
            "value": 1,
            "context_id": self.context_id,
            "roots": root,
            "outputs": root,
            "inputs": torch.ones(1, 2, requires_grad=True),
            "targets": torch.ones(1, 1),
            "loss": nn.MSELoss(),
            "module_cls": nn.Identity,
            "module_rref": self.module.get_module_rref(),
            "optimizer_class": torch.optim.SGD,
            "params_rref": self.module.remote_parameters(),
            "params": self.module.remote_parameters(),
            "param_group": {"params": []},
            "stages": [nn.Identity()],
            "workers": 1,
            "state": {},
            "state_dict": self.optimizer.state_dict(),
            "groups": [],
            "source": {"x": torch.ones(2)},
            "group": rpc.group(),
            "cls": dict,
            "device_map": {},
            "devices": [],
        }

    def arguments(self, function: Any) -> dict[str, Any]:
        """Return arguments for the required parameters of a function."""
        wanted = {
            each.name: self.right[each.name]
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        if getattr(function, "__name__", "") in ("split", "local"):
            wanted["workers"] = ["worker0"]
        return wanted
