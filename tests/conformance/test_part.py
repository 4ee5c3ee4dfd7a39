"""Quick tests of each suite of PyTorch's own tests, run against Telegrad."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import runner
from tests.conformance.results import PASSED, Result

PART = {
    "TensorPipeRpcTest": """
        add all_gather async_class_rref_proxy async_function_multi_fanout async_function_nested async_function_raise
        builtin_remote_ret callback_in_rpc deadlock duplicate_name future_nested_callback
        graceful_shutdown_with_uneven_workload init_pg_then_rpc invalid_names my_parameter_server nested_rref
        owner_rref_backward py_class_instance_method py_function_exception py_raise_in_user_func_escaped_str
        py_rref_args_user_share reinit return_future_remote rpc_barrier_subset rref_forward_chain rref_leak
        rref_proxy_class rref_str shutdown_errors user_rref_backward wait_all_with_exception world_size_one
    """,
    "TensorPipeTensorPipeAgentRpcTest": """
        dynamic_rpc_new_rank_can_communicated_with_existing_rank infer_backend_from_options
        py_sparse_tensors_in_container tensorpipe_set_default_timeout
    """,
    "TensorPipeDistAutogradTest": """
        async_dist_autograd backward_complex_python_udf backward_multiple_roots backward_node_failure
        backward_rref_multi backward_verify_hooks backward_without_context context_cleanup_nested_rpc
        graph_for_py_nested_call mixed_requires_grad nested_backward_accumulate_grads thread_local_context_id
    """,
    "TensorPipeTensorPipeAgentDistAutogradTest": "backward_simple_sparse embedding_bag_with_no_grad_tensors",
    "TensorPipeDistOptimizerTest": "dist_optim dist_optim_exception_on_constructor",
    "TensorPipeRemoteModuleTest": "forward_with_kwargs get_module_rref train_eval",
    "TensorPipeThreeWorkersRemoteModuleTest": "create_remote_module_from_module_rref send_remote_module_over_the_wire",
    "TensorPipeDdpUnderDistAutogradTest": "backward_no_ddp backward_ddp_inside",
    "TensorPipeDdpComparisonTest": "ddp_comparison ddp_comparison_uneven_inputs ddp_dist_autograd_sparse_grads",
    "TensorPipeParameterServerTest": "batch_updating_parameter_server",
    "TensorPipeReinforcementLearningRpcTest": "rl_rpc",
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
