"""What is refused of what torch makes of modules and tensors, where it is sent or combined with a context."""

from __future__ import annotations

from tests.limits.page import Limit

GROUP = """
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

LIMITS = [
    Limit(
        "Autograd",
        "selective activation checkpoints around a remote call",
        """
import functools
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def block(value):
    return there("w1", torch.sin, value @ value).exp()


with autograd.context() as context_id:
    made = checkpoint(block, x * 1, use_reentrant=False, context_fn=contexts)
    autograd.backward(context_id, made.sum())
""",
        "RuntimeError",
        "Trying to backward an extra time. You are only allowed to backward once on any region computed under",
        "it inside of the function that is called",
    ),
    Limit(
        "Modules",
        "a module of `torch.jit` with parameters that require gradients, sent in a context",
        """
with autograd.context():
    there("w1", echo, torch.jit.trace(nn.Linear(3, 3), x.detach()))
""",
        "CannotEncode",
        "a module of torch.jit whose parameters require gradients cannot be sent in an autograd context",
        "make it there",
    ),
    Limit(
        "Modules",
        "a `torch.fx.GraphModule` with such parameters, sent in a context",
        """
with autograd.context():
    there("w1", echo, torch.fx.symbolic_trace(nn.Linear(3, 3)))
""",
        "CannotDecode",
        "a value arrived but cannot be rebuilt: ValueError: Cannot assign non-leaf Tensor to parameter 'weight'",
        "make it there",
    ),
    Limit(
        "Modules",
        "a `DistributedDataParallel` that is sent in a context",
        GROUP
        + """
with autograd.context():
    there("w1", echo, nn.parallel.DistributedDataParallel(nn.Linear(3, 3)))
""",
        "CannotDecode",
        "a value arrived but cannot be rebuilt: RuntimeError: grad_accumulator() should be only called on leaf",
        "make it there",
    ),
    Limit(
        "Modules",
        "a `torch.export.ExportedProgram` that is sent",
        'there("w1", echo, torch.export.export(nn.Linear(3, 3), (torch.ones(2, 3),)))',
        "CannotDecode",
        "a value arrived but cannot be rebuilt: ",
        "the bytes of `torch.export.save`",
    ),
    Limit(
        "Modules",
        "`get_model_state_dict` and the like of `torch.distributed.checkpoint.state_dict`, of a remote module",
        """
from torch.distributed.checkpoint.state_dict import get_model_state_dict
get_model_state_dict(remote)
""",
        "UsageError",
        "Method ``named_buffers`` not supported for RemoteModule",
        "`state_dict()`, [checkpoints](checkpoints.md)",
    ),
    Limit(
        "Optimizers",
        "an optimizer whose class takes `optimizer_class`, as `ZeroRedundancyOptimizer`",
        """
from torch.distributed.optim import ZeroRedundancyOptimizer
DistributedOptimizer.for_module(ZeroRedundancyOptimizer, remote, optimizer_class=torch.optim.SGD, lr=0.1)
""",
        "TypeError",
        "DistributedOptimizer.for_module() got multiple values for argument 'optimizer_class'",
        "a subclass that fills it in",
    ),
    Limit(
        "Optimizers",
        "a group of parameters of this worker that is added",
        'optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})',
        "UsageError",
        "DistributedOptimizer takes references to parameters (params_rref), not Parameter",
        "`rpc.RRef(parameter)`",
    ),
    Limit(
        "Tensors",
        "a nested tensor of the strided layout that requires a gradient, in a context",
        """
with autograd.context():
    there("w1", echo, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True))
""",
        "UsageError",
        "a nested tensor that requires a gradient cannot be sent in an autograd context: send the list of its parts",
        "`tensor.unbind()`",
    ),
    Limit(
        "Tensors",
        "jagged tensors of one raggedness that arrive in several messages, combined",
        """
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
there("w1", echo, ragged) + ragged
""",
        "RuntimeError",
        "cannot call binary pointwise function add.Tensor with inputs of shapes",
        "send them in one call, or their `values()`",
    ),
    Limit(
        "Functions and values",
        "a process group of `torch.distributed`",
        GROUP + 'there("w1", echo, dist.group.WORLD)',
        "CannotEncode",
        "argument 0 (torch.distributed.distributed_c10d.ProcessGroup) cannot be sent: cannot pickle",
        "make it there",
    ),
    *(
        Limit(
            "Functions and values",
            what,
            f'there("w1", echo, {value})',
            "CannotEncode",
            f"argument 0{kind} cannot be sent: ",
            instead,
        )
        for what, value, kind, instead in (
            ("`torch.futures.Future`", "torch.futures.Future()", " (torch.jit.Future)", "what it will have"),
            ("`torch.Stream`", "torch.Stream(device='cpu')", " (torch.Stream)", "[devices](devices.md) of workers"),
            ("`torch.Event`", "torch.Event(device='cpu')", " (torch.Event)", "[devices](devices.md) of workers"),
            ("a node of a graph", "x.sin().grad_fn", " (builtins.SinBackward0)", "the tensor"),
            (
                "an edge of a graph",
                "torch.autograd.graph.get_gradient_edge(x)",
                "[0] (builtins.AccumulateGrad)",
                "the tensor",
            ),
        )
    ),
]
