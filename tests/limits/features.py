"""What is refused of torch's features: of autograd, transforms, recordings, modules, optimizers and tensors."""

from __future__ import annotations

from tests.limits.page import Limit

ONE_WORKER = "torch.autograd.grad and backward(inputs=...) know only this worker, but gradients of the inputs come back"
RECORDED = "a tensor cannot be sent while torch.jit.trace or make_fx records operators: the recording would have the"
TRANSFORMED = "a tensor cannot be sent from inside of a transform of torch.func (vmap, grad, jvp and the like), which"
TANGENT = "a tensor with a tangent of torch.autograd.forward_ad cannot be sent: the tangent would be lost."
NOT_THERE = "Method ``named_parameters`` not supported for RemoteModule"
FUNCTIONAL = ["jacobian", "hessian", "vjp", "jvp", "hvp", "vhp"]
INSIDE = "it inside of the function that is called"

LIMITS = [
    Limit(
        "Autograd",
        "`torch.autograd.grad` where gradients come back from another worker",
        """
with autograd.context():
    torch.autograd.grad(there("w1", torch.sin, x).sum(), x)
""",
        "UsageError",
        ONE_WORKER,
        "`telegrad.autograd.grad(context_id, outputs, inputs)`",
    ),
    Limit(
        "Autograd",
        "`loss.backward(inputs=...)` there",
        """
with autograd.context():
    there("w1", torch.sin, x).sum().backward(inputs=[x])
""",
        "UsageError",
        ONE_WORKER,
        "`telegrad.autograd.backward`, `get_gradients`",
    ),
    *(
        Limit(
            "Autograd",
            f"`torch.autograd.functional.{name}` of a function that makes remote calls",
            f"""
with autograd.context():
    more = (torch.ones_like(x),) if "{name}" in ("jvp", "hvp", "vhp") else ()
    function = (lambda a: there("w1", torch.sin, a)) if "{name}" in ("jacobian", "jvp") else (
        lambda a: there("w1", torch.sin, a).sum())
    torch.autograd.functional.{name}(function, x, *more)
""",
            "UsageError",
            ONE_WORKER,
            f"`telegrad.autograd.grad`; {INSIDE}",
        )
        for name in FUNCTIONAL
    ),
    Limit(
        "Autograd",
        "`gradcheck` and `gradgradcheck` of such a function",
        """
with autograd.context():
    torch.autograd.gradcheck(lambda a: there("w1", torch.sin, a), (x.detach().double().requires_grad_(),))
""",
        "UsageError",
        ONE_WORKER,
        INSIDE,
    ),
    Limit(
        "Autograd",
        "an edge of the graph (`GradientEdge`) as output, input or root",
        """
with autograd.context() as context_id:
    autograd.grad(context_id, x.sum(), [torch.autograd.graph.get_gradient_edge(x)])
""",
        "UsageError",
        "inputs must be tensors of this worker, not GradientEdge",
        "the tensor",
    ),
    Limit(
        "Autograd",
        "`is_grads_batched` and `materialize_grads` of `grad`",
        """
with autograd.context() as context_id:
    autograd.grad(context_id, x.sum(), x, is_grads_batched=True)
""",
        "TypeError",
        "grad() got an unexpected keyword argument 'is_grads_batched'",
        "one call for each; `allow_unused=True`",
    ),
    Limit(
        "Autograd",
        "an input of `grad` that was made in `inference_mode`",
        """
with autograd.context() as context_id:
    with torch.inference_mode():
        made = torch.ones(3, requires_grad=True)
    autograd.grad(context_id, x.sum(), made, allow_unused=True)
""",
        "UsageError",
        "one of the inputs was made in torch.inference_mode(), and so is in no graph: clone it",
        "`made.clone().requires_grad_()`",
    ),
    Limit(
        "Autograd",
        "a root that is complex",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, there("w1", torch.sin, x).to(torch.complex64).sum())
""",
        "UsageError",
        "root of type torch.complex64 is complex, all roots need to be real: take its real part",
        "`.real`, `.abs()`",
    ),
    Limit(
        "Autograd",
        "`register_multi_grad_hook` of tensors whose gradients come at several times",
        """
with autograd.context() as context_id:
    y = there("w1", torch.sin, x)
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: None)
    autograd.backward(context_id, y.sum())
""",
        "UsageError",
        "torch.autograd.graph.register_multi_grad_hook cannot wait for all gradients of these tensors",
        "`tensor.register_hook` of each",
    ),
    Limit(
        "Autograd",
        "`torch.func` (`vmap`, `grad`, `jacrev`, `hessian`) of a function that makes remote calls",
        'torch.func.vmap(lambda row: there("w1", torch.sin, row))(x)',
        "CannotEncode",
        TRANSFORMED,
        INSIDE,
    ),
    Limit(
        "Autograd",
        "`jvp`, `linearize` and `forward_ad` of one",
        """
with torch.autograd.forward_ad.dual_level():
    there("w1", torch.sin, torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
""",
        "CannotEncode",
        TANGENT,
        INSIDE,
    ),
    Limit(
        "Autograd",
        "`torch.jit.trace` of a function that makes remote calls",
        'torch.jit.trace(lambda a: there("w1", torch.sin, a) + a, (x,), check_trace=False)',
        "CannotEncode",
        RECORDED,
        "record what runs on one worker",
    ),
    Limit(
        "Autograd",
        "`make_fx` of one",
        """
from torch.fx.experimental.proxy_tensor import make_fx
make_fx(lambda a: there("w1", torch.sin, a))(x)
""",
        "CannotEncode",
        RECORDED,
        "record what runs on one worker",
    ),
    Limit(
        "Autograd",
        "`make_fx(pre_dispatch=True)` of one",
        """
from torch.fx.experimental.proxy_tensor import make_fx
make_fx(lambda a: there("w1", torch.sin, a), pre_dispatch=True)(x)
""",
        "CannotEncode",
        RECORDED,
        "record what runs on one worker",
    ),
    Limit(
        "Autograd",
        "`torch.fx.symbolic_trace` of a module that makes remote calls",
        "torch.fx.symbolic_trace(nn.Sequential(remote))",
        "CannotEncode",
        "argument ... (torch.fx.proxy.Proxy) cannot be sent: it belongs to this process, and to no other.",
        "trace what runs on one worker",
    ),
    Limit(
        "Autograd",
        "`torch.export` of one, and other uses of `FakeTensor`",
        """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    there("w1", torch.sin, torch.ones(3))
""",
        "CannotEncode",
        "a FakeTensor cannot be sent, as it has no values",
        "export what runs on one worker",
    ),
    Limit(
        "Autograd",
        "`torch.compile(fullgraph=True)` of a function that makes remote calls",
        'torch.compile(lambda a: there("w1", torch.sin, a), backend="eager", fullgraph=True)(x)',
        "Unsupported",
        "Skip inlining `torch.compiler.disable()`d function",
        "leave `fullgraph` out",
    ),
    Limit(
        "Autograd",
        "a backward pass over several workers in compiled autograd",
        """
from torch._dynamo import compiled_autograd
with autograd.context() as context_id, compiled_autograd._enable(torch.compile(backend="eager")):
    autograd.backward(context_id, there("w1", torch.sin, x).sum())
""",
        "UsageError",
        "a backward pass over several workers cannot be compiled",
        "begin it outside",
    ),
    Limit(
        "Modules",
        "`torch.func.functional_call` and `stack_module_state` of a remote module",
        "torch.func.functional_call(remote, {'weight': x}, (x,))",
        "UsageError",
        NOT_THERE,
        "a function that is called with `get_module_rref()`",
    ),
    Limit(
        "Modules",
        "`torch.nn.utils.parameters_to_vector` and `clip_grad_norm_` of a remote module",
        "nn.utils.parameters_to_vector(remote.parameters())",
        "UsageError",
        "Method ``parameters`` not supported for RemoteModule",
        "`state_dict()`; `telegrad.optim.clip_grad_norm_`",
    ),
    Limit(
        "Modules",
        "a part that is set on a remote module",
        "remote.inner = nn.Linear(3, 3)",
        "UsageError",
        "'inner' would be set here, and not in the Linear on worker 'w1': set it in a function",
        "a function that is called with `get_module_rref()`",
    ),
    Limit(
        "Modules",
        "`training` that is set on a remote module",
        "remote.training = False",
        "UsageError",
        "'training' would be set here, and not in the Linear on worker 'w1': call train() or eval()",
        "`train()`, `eval()`",
    ),
    Limit(
        "Modules",
        "`AveragedModel` of a remote module",
        "torch.optim.swa_utils.AveragedModel(remote)",
        "UsageError",
        "a RemoteModule cannot be copied, as copy.deepcopy and torch.optim.swa_utils.AveragedModel do",
        "make it where the module lives",
    ),
    Limit(
        "Modules",
        "parts by name (`get_submodule`, `get_parameter`, `len`) of a remote module",
        "remote.get_parameter('weight')",
        "AttributeError",
        "RemoteModule has no attribute `weight`",
        "`state_dict()`, `get_module_rref().rpc_sync()`",
    ),
    Limit(
        "Modules",
        "a remote module on the meta device",
        "RemoteModule('w1', nn.Linear, (3, 3), {'device': 'meta'})",
        "NotImplementedError",
        "Cannot copy out of meta tensor; no data!",
        "a function that makes it with values",
    ),
    Limit(
        "Modules",
        "conversions by `swap_tensors` while references to parameters are there",
        """
torch.__future__.set_swap_module_params_on_conversion(True)
try:
    remote.double()
finally:
    torch.__future__.set_swap_module_params_on_conversion(False)
""",
        "RuntimeError",
        "_apply(): Couldn't swap Linear.weight",
        "convert before the optimizer is made",
    ),
    Limit(
        "Modules",
        "a parametrized module that is sent",
        """
rpc.rpc_sync("w1", echo, (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),))
""",
        "CannotEncode",
        "argument 0 (torch.nn.utils.parametrize.ParametrizedLinear) cannot be sent: Serialization of parametrized",
        "make it there, `load_state_dict`",
    ),
    Limit(
        "Optimizers",
        "a step with a closure, or without a context",
        "optimizer.step(lambda: 1.0)",
        "UsageError",
        "step() takes the id of a context (context_id) first, not <function",
        "`step(context_id)`",
    ),
    Limit(
        "Optimizers",
        "the state of a parameter group whose owners keep different values in it",
        """
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["count"] = len(self.param_groups[0]["params"])
model = nn.Sequential(nn.Linear(3, 3), RemoteModule("w1", nn.Linear, (3, 3), {"bias": False}))
optimizer = DistributedOptimizer.for_module(Counting, model, lr=0.1)
with autograd.context() as context_id:
    autograd.backward(context_id, model(x).sum(), step=optimizer)
optimizer.state_dict()
""",
        "UsageError",
        "the optimizers of workers 'w0' and 'w1' have come to different values of 'count' in parameter group 0",
        "a group of their own for the parameters of each worker",
    ),
    Limit(
        "Optimizers",
        "a copy of an optimizer",
        "copy.deepcopy(optimizer)",
        "UsageError",
        "a DistributedOptimizer cannot be sent or copied",
        "`state_dict()`",
    ),
    Limit(
        "Optimizers",
        "`torch.amp.GradScaler`",
        """
with autograd.context() as context_id:
    scaler = torch.amp.GradScaler("cpu")
    autograd.backward(context_id, scaler.scale(remote(x).sum()))
    scaler.step(optimizer, context_id)
""",
        "AssertionError",
        "expected param to be torch.Tensor, got RRef",
        "`bfloat16`, which needs no scaling",
    ),
    Limit(
        "Optimizers",
        "parameters with their names",
        "DistributedOptimizer(torch.optim.SGD, [('weight', rpc.RRef(x))], lr=1)",
        "UsageError",
        "DistributedOptimizer takes one list of references, not a list of lists",
        "`for_module`, whose states have the names",
    ),
    Limit(
        "Tensors",
        "a nested tensor, a `DTensor` or another made of others, that requires a gradient, in a context",
        """
with autograd.context():
    nested = torch.nested.as_nested_tensor([torch.ones(2, requires_grad=True), torch.ones(3)], layout=torch.jagged)
    rpc.rpc_sync("w1", echo, (nested,))
""",
        "CannotEncode",
        "a tensor of the type NestedTensor that requires a gradient cannot be sent in an autograd context",
        "`tensor.values()`, `tensor.unbind()`, `tensor.to_local()`",
    ),
    Limit(
        "Tensors",
        "a sparse CSR leaf that requires a gradient, in a pass",
        """
matrix = torch.eye(3).to_sparse_csr().requires_grad_()
with autograd.context() as context_id:
    autograd.backward(context_id, there("w1", torch.matmul, matrix, x).sum())
""",
        "RuntimeError",
        "Sparse CSR tensors do not have strides",
        "`to_sparse()` (COO), or its values",
    ),
    Limit(
        "Tensors",
        "`UninitializedParameter`, in a context",
        """
with autograd.context():
    rpc.rpc_sync("w1", echo, (nn.UninitializedParameter(),))
""",
        "CannotEncode",
        "a tensor of the type UninitializedParameter that requires a gradient cannot be sent in an autograd context",
        "make the lazy module there",
    ),
    Limit(
        "Tensors",
        "tensors of `functionalize`",
        'rpc.rpc_sync("w1", echo, (torch._to_functional_tensor(torch.ones(3)),))',
        "CannotEncode",
        "a tensor of shape (3,) cannot be sent: it has no memory, or that was freed",
        INSIDE,
    ),
    Limit(
        "Tensors",
        "`torch.finfo`, `torch.iinfo`",
        'rpc.rpc_sync("w1", echo, (torch.finfo(torch.float16),))',
        "CannotEncode",
        "argument 0 (torch.finfo) cannot be sent: cannot pickle 'torch.finfo' object",
        "the data type",
    ),
]
