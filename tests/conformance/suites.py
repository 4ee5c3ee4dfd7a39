"""Make PyTorch's test classes runnable.

The wheel has the test methods, the fixtures and the code that starts the ranks, but no class that joins the three.
Each class is made on demand, since its module may fail to import against Telegrad without harm to the others.
"""

import importlib
import sys
import unittest
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase

from tests.conformance.parent import REFERENCE, WAYS

ROOM = "torch.testing._internal.distributed"
FIXTURES = {
    "TensorPipe": (f"{ROOM}.rpc.tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture"),
    "Faulty": (f"{ROOM}.rpc.faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture"),
}
PATIENCE = 5.0  # seconds for a rank to end after the request


class Suite(NamedTuple):
    """A class of test methods in torch."""

    group: str
    module: str
    source: str

    @property
    def prefix(self) -> str:
        return "Faulty" if self.group == "faulty" else "TensorPipe"


SUITES = {
    suite.prefix + suite.source: suite
    for suite in (
        Suite("cpu", "rpc.rpc_test", "RpcTest"),
        Suite("cpu", "rpc.rpc_test", "TensorPipeAgentRpcTest"),
        Suite("cpu", "rpc.dist_autograd_test", "DistAutogradTest"),
        Suite("cpu", "rpc.dist_autograd_test", "TensorPipeAgentDistAutogradTest"),
        Suite("cpu", "rpc.dist_optimizer_test", "DistOptimizerTest"),
        Suite("cpu", "nn.api.remote_module_test", "RemoteModuleTest"),
        Suite("cpu", "nn.api.remote_module_test", "ThreeWorkersRemoteModuleTest"),
        Suite("cpu", "ddp_under_dist_autograd_test", "DdpUnderDistAutogradTest"),
        Suite("cpu", "ddp_under_dist_autograd_test", "DdpComparisonTest"),
        Suite("cpu", "rpc.examples.parameter_server_test", "ParameterServerTest"),
        Suite("cpu", "rpc.examples.reinforcement_learning_rpc_test", "ReinforcementLearningRpcTest"),
        Suite("faulty", "rpc.faulty_agent_rpc_test", "FaultyAgentRpcTest"),
        Suite("faulty", "rpc.dist_autograd_test", "FaultyAgentDistAutogradTest"),
        Suite("faulty", "rpc.jit.rpc_test_faulty", "JitFaultyAgentRpcTest"),
        Suite("jit", "rpc.jit.rpc_test", "JitRpcTest"),
        Suite("jit", "rpc.jit.dist_autograd_test", "JitDistAutogradTest"),
        Suite("cuda", "rpc.rpc_test", "CudaRpcTest"),
        Suite("cuda", "rpc.rpc_test", "TensorPipeAgentCudaRpcTest"),
        Suite("cuda", "rpc.dist_autograd_test", "CudaDistAutogradTest"),
        Suite("cuda", "rpc.dist_autograd_test", "TensorPipeCudaDistAutogradTest"),
        Suite("cuda", "nn.api.remote_module_test", "CudaRemoteModuleTest"),
        Suite("cuda", "ddp_under_dist_autograd_test", "CudaDdpComparisonTest"),
    )
}
GROUPS = tuple(dict.fromkeys(suite.group for suite in SUITES.values()))


class Ranks(MultiProcessTestCase):
    """Starts the ranks of a test in the chosen way."""

    def setUp(self) -> None:
        super().setUp()
        way = next((each for each in WAYS if each in sys.argv), "fork")
        context: Any = torch.multiprocessing.get_context(way)
        self._start_processes(context.Process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        """Compare all exit codes; torch looks only at that of the first rank."""
        super()._check_return_codes(fn, elapsed_time)
        for rank, process in enumerate(self.processes):
            assert process.exitcode == self.processes[0].exitcode, f"rank {rank} ended with {process.exitcode}"

    def tearDown(self) -> None:
        ranks = self.processes
        super().tearDown()
        for rank in ranks:
            rank.join(PATIENCE)
            if rank.is_alive():
                rank.kill()
                rank.join()


class InStep:
    """`torch.distributed` for tests whose master calls other ranks right after it has made the process group."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def init_process_group(self, **how: Any) -> None:
        """Return once all ranks have made the group."""
        torch.distributed.init_process_group(**how)
        torch.distributed.barrier()


def make(name: str, *, reference: bool) -> type[unittest.TestCase]:
    """Return the class `name`, and make it importable from here, as ranks pickle its methods by name."""
    suite = SUITES[name]
    if suite.group == "faulty" and not reference:
        importlib.import_module("tests.conformance.faults")
    room = importlib.import_module(f"{ROOM}.{suite.module}")
    if suite.module == "ddp_under_dist_autograd_test":
        vars(room)["dist"] = InStep()
    source = getattr(room, suite.source)
    module, fixture = FIXTURES[suite.prefix]
    bases = (source, getattr(importlib.import_module(module), fixture), Ranks)
    globals()[name] = made = type(name, bases, {"__module__": __name__})
    return made


def __getattr__(name: str) -> type[unittest.TestCase]:
    """Make a class in a spawned rank, which imports it from here."""
    if name in SUITES:
        return make(name, reference=REFERENCE in sys.argv)
    raise AttributeError(name)


def tests(groups: tuple[str, ...]) -> list[str]:
    """Return the tests of the groups, as torch defines them."""
    loader = unittest.TestLoader()
    return [
        f"{name}.{method}"
        for name, suite in SUITES.items()
        if suite.group in groups
        for method in loader.getTestCaseNames(make(name, reference=True))
    ]
