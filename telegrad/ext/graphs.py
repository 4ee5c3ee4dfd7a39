"""Records of a forward pass, and parts of a backward pass that an extension runs itself."""

from telegrad.autograd import Step, check_context_id, check_root, check_step
from telegrad.autograd import gradients as replicas
from telegrad.autograd import gradients as sharded_gradients
from telegrad.autograd.conductor import Conductor
from telegrad.autograd.contexts import AutogradContext, Inside, entered_id
from telegrad.autograd.engine import KINDS, UNSHARED
from telegrad.autograd.gradients import Gradients
from telegrad.autograd.node_calls import is_compiled, is_function
from telegrad.autograd.passes import FusedStep
from telegrad.autograd.schedule import PLAIN
from telegrad.autograd.send_recv import Origin, RecvNode, Send, edge_of, run_backward

__all__ = [
    "KINDS", "PLAIN", "UNSHARED", "AutogradContext", "Conductor", "FusedStep", "Gradients", "Inside", "Origin",
    "RecvNode", "Send", "Step", "check_context_id", "check_root", "check_step", "edge_of", "entered_id",
    "is_compiled", "is_function", "replicas", "run_backward", "sharded_gradients",
]  # fmt: skip
