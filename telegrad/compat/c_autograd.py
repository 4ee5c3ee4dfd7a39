"""`torch._C._distributed_autograd`: the names of the C++ part of torch's distributed autograd."""

from telegrad.compat.autograd import (
    DistAutogradContext,
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    get_gradients,
)
from telegrad.compat.missing import missing_from

__all__ = [
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "get_gradients",
]

__getattr__ = missing_from("torch._C._distributed_autograd")
