"""Some tests of each suite of PyTorch's own tests, run against Telegrad; `make conformance` runs all."""

from typing import Any

import pytest

from tests.conformance import runner
from tests.conformance.results import PASSED, Result

PART = {
    "TensorPipeRpcTest": """
        async_function_nested callback_in_rpc graceful_shutdown_with_uneven_workload py_rref_args_user_share rref_leak
        shutdown_errors user_rref_backward
    """,
    "TensorPipeTensorPipeAgentRpcTest": "dynamic_rpc_new_rank_can_communicated_with_existing_rank",
    "TensorPipeDistAutogradTest": """
        backward_node_failure context_cleanup_nested_rpc nested_backward_accumulate_grads
    """,
    "TensorPipeTensorPipeAgentDistAutogradTest": "backward_simple_sparse",
    "TensorPipeDistOptimizerTest": "dist_optim",
    "TensorPipeThreeWorkersRemoteModuleTest": "create_remote_module_from_module_rref",
    "TensorPipeDdpUnderDistAutogradTest": "backward_ddp_inside",
    "TensorPipeParameterServerTest": "batch_updating_parameter_server",
    "FaultyFaultyAgentRpcTest": "remote_message_dropped_pickle",
}
TESTS = [f"{suite}.test_{name}" for suite, names in PART.items() for name in names.split()]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    """Run all chosen tests at once; return their results."""
    items: list[Any] = request.session.items
    chosen = [item.callspec.params["test"] for item in items if item.module is request.module]
    return {result.test: result for result in runner.run(chosen)}


@pytest.mark.timeout(300)  # the first test waits for all
@pytest.mark.parametrize("test", TESTS)
def test_torchs_own(test: str, results: dict[str, Result]) -> None:
    assert results[test].outcome == PASSED, f"{results[test].why}; see {runner.LOGS / test}.log"
