"""Make calls, run incoming calls, and track a call: the parts that `rpc_sync` and similar functions use."""

from telegrad._core.agent import inspection
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_each import EachCall
from telegrad._core.agent.call_server import ASYNC_MARK, Deferred
from telegrad._core.agent.incoming import Incoming
from telegrad._core.agent.pending_call import PendingCall, PreparedCall
from telegrad._core.calls import call_context, futures, profiling
from telegrad._core.calls.call_context import CallerContext, NestedCall
from telegrad._core.calls.call_names import known_as, not_compiled, runs_as, user_name
from telegrad._core.calls.futures import Future, Helper, Signal, complete, completion_of
from telegrad._core.calls.profiling import CallEvent
from telegrad._core.calls.settings import DEFAULT, check_timeout, limit_of
from telegrad._core.pickling.remote_text import fold, folded
from telegrad._core.rpc import retry
from telegrad._core.rpc.conversion import convert, target
from telegrad._core.rpc.joint_calls import StepCounter, call_all, first_cause, summary
from telegrad._core.rpc.remote_calls import Async, Awaited, How, NoArgs, Unchecked, remote, rpc_async, rpc_sync
from telegrad._core.rpc.retry import await_workers, wait_or_cancel
from telegrad._core.rpc.retry_queue import RetryPolicy
from telegrad._core.streams.producer import current_call
from telegrad._core.worker.actors import FifoLock

__all__ = [
    "ASYNC_MARK", "DEFAULT", "Agent", "Async", "Awaited", "CallEvent", "CallerContext", "Deferred", "EachCall",
    "FifoLock", "Future", "Helper", "How", "Incoming", "NestedCall", "NoArgs", "PendingCall", "PreparedCall",
    "RetryPolicy", "Signal", "StepCounter", "Unchecked", "await_workers", "call_all", "call_context",
    "check_timeout", "complete", "completion_of", "convert", "current_call", "first_cause", "fold", "folded", "futures",
    "inspection", "known_as", "limit_of", "not_compiled", "profiling", "remote", "retry", "rpc_async", "rpc_sync",
    "runs_as", "summary", "target", "user_name", "wait_or_cancel",
]  # fmt: skip
