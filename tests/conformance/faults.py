"""The backend FAULTY_TENSORPIPE for Telegrad: late or lost calls, and broken connections.

Torch drops a message and expects it to be sent again. Telegrad sends it once over a connection that holds or breaks, so
this backend breaks the connection.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.rpc import backend_registry

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.references import Batch
from telegrad._core.worker import current
from telegrad._core.worker.value_access import fetch
from telegrad.autograd.contexts import Release
from telegrad.errors import PeerLost
from telegrad.rpc import TensorPipeRpcBackendOptions

NOTICES: dict[str, type[Any]] = {"RREF_FORK_REQUEST": Batch, "RREF_CHILD_ACCEPT": Batch, "RREF_USER_DELETE": Batch}
NOTICES["CLEANUP_AUTOGRAD_CONTEXT_REQ"] = Release


class FaultyOptions(TensorPipeRpcBackendOptions):
    """The options of torch's fault injector."""

    def __init__(
        self, *, messages_to_fail: list[str], messages_to_delay: dict[str, float], num_fail_sends: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self.messages_to_fail, self.messages_to_delay = messages_to_fail, messages_to_delay
        self.num_fail_sends = num_fail_sends


def late(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function after a delay."""
    time.sleep(seconds)
    return function(*args, **kwargs)


def kind_of(function: Any, creating: bool) -> str:
    """Return torch's name for the message."""
    if function is fetch:
        return "SCRIPT_RREF_FETCH_CALL"
    by_torch = torch.jit._builtins._find_builtin(function) or isinstance(function, torch.jit.ScriptFunction)
    return ("SCRIPT" if by_torch else "PYTHON") + ("_REMOTE_CALL" if creating else "_CALL")


class Faults:
    """Injects faults between a worker's agent and its connections."""

    def __init__(self, agent: Agent, options: FaultyOptions) -> None:
        self.options = options
        self.cuts = {NOTICES[name]: options.num_fail_sends for name in options.messages_to_fail if name in NOTICES}
        self.agent, self.perform, self.call_for, self.notify = agent, agent.perform, agent.call_for, agent.notify
        for name in ("perform", "call_for", "notify"):
            setattr(agent, name, getattr(self, f"faulty_{name}"))

    def delayed(self, call: PreparedCall, creating: bool) -> PreparedCall:
        seconds = self.options.messages_to_delay.get(kind_of(call.function, creating))
        return call._replace(function=late, args=(seconds, call.function, *(call.args or ()))) if seconds else call

    def faulty_perform(self, to: Any, call: PreparedCall, *rest: Any) -> Any:
        return self.perform(to, self.delayed(call, False), *rest)

    def faulty_call_for(self, outcome: Any, to: Any, call: PreparedCall, timeout: float, creation: Any = None) -> None:
        if kind_of(call.function, creation is not None) in self.options.messages_to_fail:
            outcome.set_exception(PeerLost(f"the message to {to!r} was lost, as the test wants it"))
            return
        self.call_for(outcome, to, self.delayed(call, creation is not None), timeout, creation)

    def faulty_notify(self, to: Any, message: Any, *rest: Any, **named: Any) -> None:
        left = self.cuts.get(type(message), 0)
        if left:
            self.cuts[type(message)] = left - 1
            broken = PeerLost("the connection broke, as the test wants it")
            if isinstance(message, Batch):
                raise broken  # nothing was sent, so the delivery retries
            link = self.agent._connections.peer(to).link
            if link is not None:
                link.close(broken)
        self.notify(to, message, *rest, **named)


def make_options(rpc_timeout: float, init_method: str, **options: Any) -> FaultyOptions:
    return FaultyOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def join_group(rpc_backend_options: FaultyOptions, **known: Any) -> Any:
    join: Any = backend_registry._join_group  # type: ignore[attr-defined]  # Telegrad's, in torch's place
    agent = join(rpc_backend_options=rpc_backend_options, **known)
    assert current.worker is not None
    Faults(current.worker.agent, rpc_backend_options)
    return agent


sys.modules["torch.distributed.rpc._testing"] = sys.modules[__name__]  # torch's module would do so, too
backend_registry.register_backend("FAULTY_TENSORPIPE", make_options, join_group)
