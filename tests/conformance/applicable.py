"""Tests that are not applicable: each uses a part of torch that Telegrad omits on purpose.

A test that is merely hard to pass is not listed here. Tests that need CUDA skip themselves without it.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

NOT_APPLICABLE: dict[str, tuple[str, ...]] = {
    "calls RPC operators from TorchScript code": (
        "FaultyJitFaultyAgentRpcTest.test_timeout_in_python",
        "FaultyJitFaultyAgentRpcTest.test_timeout_in_torchscript_function",
        "TensorPipeJitRpcTest.test_all_kwargs_are_populated_by_defaults",
        "TensorPipeJitRpcTest.test_args_and_kwargs_contain_different_types",
        "TensorPipeJitRpcTest.test_args_kwargs_are_neither_passed",
        "TensorPipeJitRpcTest.test_async_function_remote",
        "TensorPipeJitRpcTest.test_async_function_remote_multi",
        "TensorPipeJitRpcTest.test_async_function_simple",
        "TensorPipeJitRpcTest.test_call_python_function_remotely_from_script_not_supported",
        "TensorPipeJitRpcTest.test_call_rpc_with_profiling",
        "TensorPipeJitRpcTest.test_call_script_function_that_not_exists_remotely_from_script",
        "TensorPipeJitRpcTest.test_call_script_function_that_raises_remotely_from_script",
        "TensorPipeJitRpcTest.test_future_passed_between_python_and_jit",
        "TensorPipeJitRpcTest.test_kwargs_not_passed",
        "TensorPipeJitRpcTest.test_no_kwargs_are_populated_by_defaults",
        "TensorPipeJitRpcTest.test_record_function_on_caller_rpc_async",
        "TensorPipeJitRpcTest.test_rpc_async_jit_profiled",
        "TensorPipeJitRpcTest.test_rpc_torchscript_record_function",
        "TensorPipeJitRpcTest.test_some_kwargs_are_populated_by_defaults",
        "TensorPipeJitDistAutogradTest.test_jit_fork_within_context",
        "TensorPipeJitDistAutogradTest.test_restore_context_after_swtich_to_jit_thread",
    ),
    "uses references inside of TorchScript code": (
        "TensorPipeDistAutogradTest.test_trainer_ps_torchscript_functions",
        "FaultyJitFaultyAgentRpcTest.test_remote_timeout_to_here_in_jit",
        "FaultyJitFaultyAgentRpcTest.test_rref_timeout_pickle_in_jit",
        "FaultyJitFaultyAgentRpcTest.test_rref_to_here_timeout_in_jit",
        "TensorPipeJitRpcTest.test_load_script_module_with_pickled_rref",
        "TensorPipeJitRpcTest.test_local_rref_local_value",
        "TensorPipeJitRpcTest.test_my_script_module_with_rrefs",
        "TensorPipeJitRpcTest.test_remote_script_module",
        "TensorPipeJitRpcTest.test_return_local_script_class_rref_in_py_and_use_in_script",
        "TensorPipeJitRpcTest.test_return_local_script_module_rref_in_py_and_use_in_script",
        "TensorPipeJitRpcTest.test_rref_as_arg_and_return",
        "TensorPipeJitRpcTest.test_rref_is_owner",
        "TensorPipeJitRpcTest.test_rref_jit_pickle_not_supported",
        "TensorPipeJitRpcTest.test_rref_list_mutate",
        "TensorPipeJitRpcTest.test_rref_local_value",
        "TensorPipeJitRpcTest.test_rref_python_annotation",
        "TensorPipeJitRpcTest.test_user_rrefs_confirmed",
        "TensorPipeJitRpcTest.test_user_rrefs_confirmed_remote",
    ),
    "asserts that a backward pass never ends, where Telegrad's does": (
        "TensorPipeDistAutogradTest.test_backward_unused_send_function",
    ),
}


def reason(test: str) -> str | None:
    """Return the reason why the test is not applicable, or None."""
    return next(
        (why for why, patterns in NOT_APPLICABLE.items() if any(fnmatchcase(test, pattern) for pattern in patterns)),
        None,
    )


def stale(tests: Iterable[str]) -> list[str]:
    """Return the patterns that match none of the tests."""
    names = list(tests)
    patterns = [pattern for group in NOT_APPLICABLE.values() for pattern in group]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
