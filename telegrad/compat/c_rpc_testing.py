"""`torch._C._distributed_rpc_testing`: an agent that loses messages on purpose, which Telegrad does not have."""

from telegrad.compat.missing import missing_from

__all__: list[str] = []

__getattr__ = missing_from("torch._C._distributed_rpc_testing")
