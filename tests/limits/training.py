"""Uses of autograd, modules and optimizers that are refused; `page.py` describes the form of the rows."""

REFUSED = {
    "Autograd": """
## a context inside of a context
with autograd.context():
    with autograd.context():
        pass
UsageError: Already have an autograd context id for this thread: .... Leave that context first
-> leave the first one, or pass its number on
## `loss.backward()` where the graph leads to another worker
with autograd.context():
    there("w1", torch.sin, x).sum().backward()
UsageError: the graph leads to tensors that came from worker 'w1' in context .... Run it with
-> `telegrad.autograd.backward(context_id, loss)`
## a backward pass into another context
with autograd.context():
    y = there("w1", torch.sin, x)
with autograd.context() as context_id:
    autograd.backward(context_id, y.sum())
UsageError: the graph of context ... leads to tensors that came from worker 'w1' in another context, .... Detach
-> `detach()` what outlives its context
## a root that is no scalar
with autograd.context() as context_id:
    autograd.backward(context_id, x * 2)
UsageError: root of shape (3, 3) is not a scalar, all roots need to be scalar: sum it up
-> `loss.sum()` or `loss.mean()`
## a root without a graph
with autograd.context() as context_id:
    autograd.backward(context_id, torch.tensor(1.0))
UsageError: requires_grad not set on root: there is no graph to run backward
-> a root that depends on something with `requires_grad`
## a backward pass without roots
with autograd.context() as context_id:
    autograd.backward(context_id, [])
UsageError: No tensors provided for gradient computation: give at least one root
-> one root at least
## a root that is no tensor
with autograd.context() as context_id:
    autograd.backward(context_id, 1.0)
UsageError: a root must be a tensor or a reference to one, not float
-> tensors, or references to such
## a reference to something else as a root
with autograd.context() as context_id:
    autograd.backward(context_id, rpc.remote("w1", abs, (3,)))
UsageError: an RRef should contain a tensor for .backward(), not int: roots are tensors
-> a reference to a tensor
## a context that has ended
with autograd.context() as context_id:
    pass
autograd.get_gradients(context_id)
ContextEnded: Could not find autograd context with id: ... on worker 'w0'
-> ask inside of the `with` block
## a second pass over the same graph
with autograd.context() as context_id:
    loss = there("w1", torch.sin, x).sum()
    autograd.backward(context_id, loss)
    autograd.backward(context_id, loss)
RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have
-> `retain_graph=True` in the first one
## a remote call inside of a reentrant checkpoint
def run(a):
    return there("w1", torch.sin, a)

with autograd.context() as context_id:
    y = torch.utils.checkpoint.checkpoint(run, x * 1, use_reentrant=True)
    autograd.backward(context_id, y.sum())
UsageError: the function of a torch.utils.checkpoint with use_reentrant=True leads to a tensor
-> `use_reentrant=False`
## a fast pass in which no tensor of a message takes part
with autograd.context() as context_id:
    y = there("w1", torch.sin, x)
    there("w1", torch.cos, y)
    autograd.backward(context_id, y.sum(), mode="fast")
UnusedSends: mode='fast' requires that every sent tensor takes part in the backward pass, but no gradient
-> `mode="smart"`, the default
## a step that is no distributed optimizer
with autograd.context() as context_id:
    autograd.backward(context_id, x.sum(), step=torch.optim.SGD([x], lr=1))
UsageError: step must be a DistributedOptimizer, not SGD
-> `DistributedOptimizer`, or its `clipped(...)`
## `torch.autograd.grad` where gradients come back from another worker
with autograd.context():
    torch.autograd.grad(there("w1", torch.sin, x).sum(), x)
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad(context_id, outputs, inputs)`
## `loss.backward(inputs=...)` there
with autograd.context():
    there("w1", torch.sin, x).sum().backward(inputs=[x])
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.backward`, `get_gradients`
## `torch.autograd.functional.jacobian` of a function that makes remote calls
with autograd.context():
    torch.autograd.functional.jacobian(lambda a: there("w1", torch.sin, a), x)
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad`; it inside of the function that is called
## `torch.autograd.functional.hessian` of a function that makes remote calls
with autograd.context():
    torch.autograd.functional.hessian(lambda a: there("w1", torch.sin, a).sum(), x)
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad`; it inside of the function that is called
## `torch.autograd.functional.vjp` of a function that makes remote calls
with autograd.context():
    torch.autograd.functional.vjp(lambda a: there("w1", torch.sin, a).sum(), x)
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad`; it inside of the function that is called
## `torch.autograd.functional.jvp` of a function that makes remote calls
with autograd.context():
    torch.autograd.functional.jvp(lambda a: there("w1", torch.sin, a), x, torch.ones_like(x))
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad`; it inside of the function that is called
## `torch.autograd.functional.hvp` of a function that makes remote calls
with autograd.context():
    torch.autograd.functional.hvp(lambda a: there("w1", torch.sin, a).sum(), x, torch.ones_like(x))
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad`; it inside of the function that is called
## `torch.autograd.functional.vhp` of a function that makes remote calls
with autograd.context():
    torch.autograd.functional.vhp(lambda a: there("w1", torch.sin, a).sum(), x, torch.ones_like(x))
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> `telegrad.autograd.grad`; it inside of the function that is called
## `gradcheck` and `gradgradcheck` of such a function
with autograd.context():
    torch.autograd.gradcheck(lambda a: there("w1", torch.sin, a), (x.detach().double().requires_grad_(),))
UsageError: torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs also come
-> it inside of the function that is called
## an edge of the graph (`GradientEdge`) as output, input or root
with autograd.context() as context_id:
    autograd.grad(context_id, x.sum(), [torch.autograd.graph.get_gradient_edge(x)])
UsageError: inputs must be tensors of this worker, not GradientEdge
-> the tensor
## `is_grads_batched` and `materialize_grads` of `grad`
with autograd.context() as context_id:
    autograd.grad(context_id, x.sum(), x, is_grads_batched=True)
TypeError: grad() got an unexpected keyword argument 'is_grads_batched'
-> one call for each; `allow_unused=True`
## an input of `grad` that was made in `inference_mode`
with autograd.context() as context_id:
    with torch.inference_mode():
        made = torch.ones(3, requires_grad=True)
    autograd.grad(context_id, x.sum(), made, allow_unused=True)
UsageError: one of the inputs was made in torch.inference_mode(), and so has no graph: clone it
-> `made.clone().requires_grad_()`
## a received input of `grad` that has a hook, beside others
with autograd.context() as context_id:
    y = there("w1", torch.sin, x)
    y.register_hook(lambda g: g * 3)
    autograd.grad(context_id, y.sum(), [y, x])
UsageError: one of the inputs came from worker 'w1' and has a hook, and other inputs may contribute to it. Register
-> `z = y.view_as(y)`, and use, hook and ask for `z`
## a complex gradient of a real output in `grad`, or the reverse
with autograd.context() as context_id:
    autograd.grad(context_id, there("w1", torch.sin, x), x, x + 1j)
UsageError: grad_outputs has (3, 3), torch.complex64, for an output of shape (3, 3) and type torch.float32: give
-> a gradient of its type
## a root that is complex
with autograd.context() as context_id:
    autograd.backward(context_id, there("w1", torch.sin, x).to(torch.complex64).sum())
UsageError: root of type torch.complex64 is complex, all roots need to be real: take its real part
-> `.real`, `.abs()`
## `register_multi_grad_hook` of tensors whose gradients come at several times
with autograd.context() as context_id:
    y = there("w1", torch.sin, x)
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: None)
    autograd.backward(context_id, y.sum())
UsageError: torch.autograd.graph.register_multi_grad_hook cannot wait for all gradients of these tensors
-> `tensor.register_hook` of each
## `torch.func` (`vmap`, `grad`, `jacrev`, `hessian`) of a function that makes remote calls
torch.func.vmap(lambda row: there("w1", torch.sin, row))(x)
CannotEncode: a tensor cannot be sent from inside a transform of torch.func (vmap, grad, jvp and the like), which
-> it inside of the function that is called
## `jvp`, `linearize` and `forward_ad` of one
with torch.autograd.forward_ad.dual_level():
    there("w1", torch.sin, torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
CannotEncode: a tensor with a tangent of torch.autograd.forward_ad cannot be sent: the tangent would be lost.
-> it inside of the function that is called
## `torch.jit.trace` of a function that makes remote calls
torch.jit.trace(lambda a: there("w1", torch.sin, a) + a, (x,), check_trace=False)
CannotEncode: a tensor cannot be sent while torch.jit.trace or make_fx records operators: the recording would contain
-> record what runs on one worker
## `make_fx` of one
from torch.fx.experimental.proxy_tensor import make_fx
make_fx(lambda a: there("w1", torch.sin, a))(x)
CannotEncode: a tensor cannot be sent while torch.jit.trace or make_fx records operators: the recording would contain
-> record what runs on one worker
## `make_fx(pre_dispatch=True)` of one
from torch.fx.experimental.proxy_tensor import make_fx
make_fx(lambda a: there("w1", torch.sin, a), pre_dispatch=True)(x)
CannotEncode: a tensor cannot be sent while torch.jit.trace or make_fx records operators: the recording would contain
-> record what runs on one worker
## `torch.fx.symbolic_trace` of a module that makes remote calls
torch.fx.symbolic_trace(nn.Sequential(remote))
CannotEncode: argument ... (torch.fx.proxy.Proxy) cannot be sent: it belongs to this process only.
-> trace what runs on one worker
## `torch.export` of one, and other uses of `FakeTensor`
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    there("w1", torch.sin, torch.ones(3))
CannotEncode: a FakeTensor cannot be sent, as it has no values
-> export what runs on one worker
## `torch.compile(fullgraph=True)` of a function that makes remote calls
torch.compile(lambda a: there("w1", torch.sin, a), backend="eager", fullgraph=True)(x)
Unsupported: Skip inlining `torch.compiler.disable()`d function
-> leave `fullgraph` out
## a backward pass over several workers in compiled autograd
from torch._dynamo import compiled_autograd
with autograd.context() as context_id, compiled_autograd._enable(torch.compile(backend="eager")):
    autograd.backward(context_id, there("w1", torch.sin, x).sum())
UsageError: a backward pass over several workers cannot be compiled
-> begin it outside
## selective activation checkpoints around a remote call
import functools
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def block(value):
    return there("w1", torch.sin, value @ value).exp()


with autograd.context() as context_id:
    made = checkpoint(block, x * 1, use_reentrant=False, context_fn=contexts)
    autograd.backward(context_id, made.sum())
RuntimeError: Trying to backward an extra time. You are only allowed to backward once on any region computed under
-> it inside of the function that is called
""",
    "Modules": """
## `parameters()` of a remote module
remote.parameters()
UsageError: Method ``parameters`` not supported for RemoteModule
-> `remote_parameters()`
## `named_parameters()` of a remote module
remote.named_parameters()
UsageError: Method ``named_parameters`` not supported for RemoteModule
-> `remote_parameters()`, `state_dict()`
## `buffers()` of a remote module
remote.buffers()
UsageError: Method ``buffers`` not supported for RemoteModule
-> `state_dict()`
## `named_buffers()` of a remote module
remote.named_buffers()
UsageError: Method ``named_buffers`` not supported for RemoteModule
-> `state_dict()`
## `register_buffer` of a remote module
remote.register_buffer('b', x)
UsageError: Method ``register_buffer`` not supported for RemoteModule
-> register it in the constructor of the module
## `register_parameter` of a remote module
remote.register_parameter('p', nn.Parameter(x))
UsageError: Method ``register_parameter`` not supported for RemoteModule
-> register it in the constructor of the module
## `add_module` of a remote module
remote.add_module('m', nn.Linear(1, 1))
UsageError: Method ``add_module`` not supported for RemoteModule
-> add it in the constructor of the module
## a copy or a pickle of a remote module
import pickle
pickle.dumps(remote)
UsageError: Cannot pickle RemoteModule in python pickler
-> `state_dict()`
## `state_dict(keep_vars=True)` of a remote module
remote.state_dict(keep_vars=True)
UsageError: a RemoteModule's state is a copy: keep_vars and positional arguments are not supported
-> leave `keep_vars` out
## attributes of a remote module
remote.weight
AttributeError: RemoteModule has no attribute 'weight'
-> `get_module_rref().rpc_sync()`, `state_dict()`
## a constructor that gives no module
RemoteModule('w1', dict)
ValueError: Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an
-> a class of modules, or a function that makes one
## a device without a worker
RemoteModule('cpu', nn.Linear, (3, 3))
UsageError: remote_device: 'cpu' is not a place for a module: it does not name a worker
-> `worker/device`
## a slash without a device
RemoteModule('w1/', nn.Linear, (3, 3))
UsageError: remote_device: 'w1/' is not a place for a module: no device follows the slash
-> `worker/device`
## an unknown device
RemoteModule('w1/gpu', nn.Linear, (3, 3))
UsageError: remote_device: 'w1/gpu' is not a place for a module: Expected one of cpu, cuda, ipu, xpu, mkldnn, opengl
-> `cpu`, `cuda:0`
## a reference to something else as a module
RemoteModule.init_from_module_rref('w1', rpc.remote('w1', dict))
ValueError: ... is a reference to an instance of <class 'dict'>, not of <class nn.Module>
-> a reference to a module
## a reference on another worker
RemoteModule.init_from_module_rref('w2', remote.get_module_rref())
UsageError: remote_device: ... is not on worker 'w2', but on 'w1': name it
-> name its owner
## `torch.func.functional_call` and `stack_module_state` of a remote module
torch.func.functional_call(remote, {'weight': x}, (x,))
UsageError: Method ``named_parameters`` not supported for RemoteModule
-> a function that is called with `get_module_rref()`
## `torch.nn.utils.parameters_to_vector` and `clip_grad_norm_` of a remote module
nn.utils.parameters_to_vector(remote.parameters())
UsageError: Method ``parameters`` not supported for RemoteModule
-> `state_dict()`; `telegrad.optim.clip_grad_norm_`
## a part that is set on a remote module
remote.inner = nn.Linear(3, 3)
UsageError: 'inner' would be set here, and not in the Linear on worker 'w1': set it in a function
-> a function that is called with `get_module_rref()`
## `training` that is set on a remote module
remote.training = False
UsageError: 'training' would be set here, and not in the Linear on worker 'w1': call train() or eval()
-> `train()`, `eval()`
## `AveragedModel` of a remote module
torch.optim.swa_utils.AveragedModel(remote)
UsageError: a RemoteModule cannot be copied, as copy.deepcopy and torch.optim.swa_utils.AveragedModel do
-> make it where the module lives
## parts by name (`get_submodule`, `get_parameter`, `len`) of a remote module
remote.get_parameter('weight')
AttributeError: RemoteModule has no attribute `weight`
-> `state_dict()`, `get_module_rref().rpc_sync()`
## a remote module on the meta device
RemoteModule('w1', nn.Linear, (3, 3), {'device': 'meta'})
NotImplementedError: Cannot copy out of meta tensor; no data!
-> a function that makes it with values
## conversions by `swap_tensors` while references to parameters are there
torch.__future__.set_swap_module_params_on_conversion(True)
try:
    remote.double()
finally:
    torch.__future__.set_swap_module_params_on_conversion(False)
RuntimeError: _apply(): Couldn't swap Linear.weight
-> convert before the optimizer is made
## a parametrized module that is sent
rpc.rpc_sync("w1", echo, (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),))
CannotEncode: argument 0 (torch.nn.utils.parametrize.ParametrizedLinear) cannot be sent: Serialization of parametrized
-> make it there, `load_state_dict`
## a module of `torch.jit` with parameters that require gradients, sent in a context
with autograd.context():
    there("w1", echo, torch.jit.trace(nn.Linear(3, 3), x.detach()))
CannotEncode: a module of torch.jit whose parameters require gradients cannot be sent in an autograd context
-> make it there
## a `torch.fx.GraphModule` with such parameters, sent in a context
with autograd.context():
    there("w1", echo, torch.fx.symbolic_trace(nn.Linear(3, 3)))
CannotDecode: a value arrived but cannot be rebuilt: ValueError: Cannot assign non-leaf Tensor to parameter 'weight'
-> make it there
## a `DistributedDataParallel` that is sent in a context
one_process()

with autograd.context():
    there("w1", echo, nn.parallel.DistributedDataParallel(nn.Linear(3, 3)))
CannotDecode: a value arrived but cannot be rebuilt: RuntimeError: grad_accumulator() should be only called on leaf
-> make it there
## a `torch.export.ExportedProgram` that is sent
there("w1", echo, torch.export.export(nn.Linear(3, 3), (torch.ones(2, 3),)))
CannotDecode: a value arrived but cannot be rebuilt:
-> the bytes of `torch.export.save`
## `get_model_state_dict` and the like of `torch.distributed.checkpoint.state_dict`, of a remote module
from torch.distributed.checkpoint.state_dict import get_model_state_dict
get_model_state_dict(remote)
UsageError: Method ``named_buffers`` not supported for RemoteModule
-> `state_dict()`, [checkpoints](checkpoints.md)
""",
    "Optimizers": """
## an optimizer whose step needs a closure
DistributedOptimizer.for_module(torch.optim.LBFGS, remote)
UsageError: LBFGS cannot be used over several workers: its step needs a closure that computes the loss again
-> an optimizer that steps once for each pass
## `zero_grad()`
optimizer.zero_grad()
UsageError: DistributedOptimizer has no gradients to set to zero: they belong to the autograd context and end with it
-> nothing: gradients go with their context
## hooks of `state_dict` and `load_state_dict`
optimizer.register_load_state_dict_post_hook(print)
UsageError: DistributedOptimizer does not support state hooks: change the result of state_dict()
-> a function of yours around the two
## something that is no optimizer
DistributedOptimizer.for_module(dict, remote)
UsageError: dict is not an optimizer class: it has no step
-> a class of `torch.optim`
## an optimizer in the place of its class
DistributedOptimizer(torch.optim.SGD([x], lr=1), [rpc.RRef(x)])
UsageError: DistributedOptimizer takes a class of optimizers (optimizer_class), not SGD: write
-> the class, and its arguments
## parameters that are no references
DistributedOptimizer(torch.optim.SGD, [x], lr=1)
UsageError: DistributedOptimizer takes references to parameters (params_rref), not Tensor
-> `rpc.RRef(parameter)`, or `for_module`
## no parameters
DistributedOptimizer(torch.optim.SGD, [], lr=1)
InvalidArgument: there is no parameter to optimize: the list of references (params_rref) is empty
-> one at least
## a model that is no module
DistributedOptimizer.for_module(torch.optim.SGD, 5, lr=1)
UsageError: a model must be an nn.Module, RemoteModule or RRef to a module, not int
-> a module, a remote module, or a reference to one
## a model without parameters
DistributedOptimizer.for_module(torch.optim.SGD, nn.ReLU(), lr=1)
UsageError: there is no parameter to optimize: the modules have none
-> one at least
## an optimizer that is sent
rpc.rpc_sync('w1', id, (optimizer,))
CannotEncode: argument 0 cannot be sent: a DistributedOptimizer cannot be sent or copied: wrap it in an RRef
-> step where it was made
## an optimizer of torch over remote modules
torch.optim.SGD(remote.parameters(), lr=1)
UsageError: Method ``parameters`` not supported for RemoteModule
-> `DistributedOptimizer.for_module`
## clipping with tensors
with autograd.context() as context_id:
    clip_grad_norm_(context_id, [x], 1.0)
UsageError: clip_grad_norm_ takes a DistributedOptimizer or references (params), not Tensor: write
-> the optimizer, or references
## clipping an infinite norm, where that shall be an error
with autograd.context() as context_id:
    autograd.backward(context_id, (remote(x) * float("inf")).sum())
    clip_grad_norm_(context_id, optimizer, 1.0, error_if_nonfinite=True)
RuntimeError: the norm of order 2 of the gradients of context ... is inf, so they cannot be clipped
-> `error_if_nonfinite=False`
## a state with parameters of other names
state = optimizer.state_dict()
state['param_groups'][0]['params'] = ['other']
optimizer.load_state_dict(state)
UsageError: this state has other parameters; only the state has other; only the optimizer has bias, weight
-> the state of the same model
## a state that has no parameter groups
optimizer.load_state_dict({})
InvalidArgument: state_dict must be a dictionary that state_dict() gave, not {}
-> what `state_dict()` gave
## a step with a closure instead of a context
optimizer.step(lambda: 1.0)
InvalidArgument: step() takes the id of a context (context_id) first, not <function
-> `step(context_id)`
## the state of a parameter group whose owners keep different values in it
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["count"] = len(self.param_groups[0]["params"])
model = nn.Sequential(nn.Linear(3, 3), RemoteModule("w1", nn.Linear, (3, 3), {"bias": False}))
optimizer = DistributedOptimizer.for_module(Counting, model, lr=0.1)
with autograd.context() as context_id:
    autograd.backward(context_id, model(x).sum(), step=optimizer)
optimizer.state_dict()
UsageError: the optimizers of workers 'w0' and 'w1' have different values of 'count' in parameter group 0
-> a group of their own for the parameters of each worker
## a copy of an optimizer
copy.deepcopy(optimizer)
UsageError: a DistributedOptimizer cannot be sent or copied
-> `state_dict()`
## `torch.amp.GradScaler`
with autograd.context() as context_id:
    scaler = torch.amp.GradScaler("cpu")
    autograd.backward(context_id, scaler.scale(remote(x).sum()))
    scaler.step(optimizer, context_id)
AssertionError: expected param to be torch.Tensor, got RRef
-> `bfloat16`, which needs no scaling
## parameters with their names
DistributedOptimizer(torch.optim.SGD, [('weight', rpc.RRef(x))], lr=1)
UsageError: DistributedOptimizer takes one list of references, not a list of lists
-> `for_module`, whose states have the names
## an optimizer whose class takes `optimizer_class`, as `ZeroRedundancyOptimizer`
from torch.distributed.optim import ZeroRedundancyOptimizer
DistributedOptimizer.for_module(ZeroRedundancyOptimizer, remote, optimizer_class=torch.optim.SGD, lr=0.1)
TypeError: DistributedOptimizer.for_module() got multiple values for argument 'optimizer_class'
-> a subclass that fills it in
## a group of parameters of this worker that is added
optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
UsageError: DistributedOptimizer takes references to parameters (params_rref), not Parameter
-> `rpc.RRef(parameter)`
""",
}
