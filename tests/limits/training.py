"""What autograd, modules and optimizers refuse."""

from __future__ import annotations

from tests.limits.page import Limit

LIMITS = [
    Limit(
        "Autograd",
        "a context inside of a context",
        """
with autograd.context():
    with autograd.context():
        pass
""",
        "UsageError",
        "Already have an autograd context id for this thread: .... End that context first",
        "leave the first one, or pass its number on",
    ),
    Limit(
        "Autograd",
        "`loss.backward()` where the graph leads to another worker",
        """
with autograd.context():
    there("w1", torch.sin, x).sum().backward()
""",
        "UsageError",
        "the graph leads to tensors that came from worker 'w1' in context .... Run it with",
        "`telegrad.autograd.backward(context_id, loss)`",
    ),
    Limit(
        "Autograd",
        "a backward pass into another context",
        """
with autograd.context():
    y = there("w1", torch.sin, x)
with autograd.context() as context_id:
    autograd.backward(context_id, y.sum())
""",
        "UsageError",
        "the graph of context ... leads to tensors that came from worker 'w1' in another context, .... Detach",
        "`detach()` what outlives its context",
    ),
    Limit(
        "Autograd",
        "a root that is no scalar",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, x * 2)
""",
        "UsageError",
        "root of shape (3, 3) is not a scalar, all roots need to be scalar: sum it up",
        "`loss.sum()` or `loss.mean()`",
    ),
    Limit(
        "Autograd",
        "a root without a graph",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, torch.tensor(1.0))
""",
        "UsageError",
        "requires_grad not set on root: there is no graph to run backward",
        "a root that depends on something with `requires_grad`",
    ),
    Limit(
        "Autograd",
        "a backward pass without roots",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, [])
""",
        "UsageError",
        "No tensors provided for gradient computation: give at least one root",
        "one root at least",
    ),
    Limit(
        "Autograd",
        "a root that is no tensor",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, 1.0)
""",
        "UsageError",
        "a root must be a tensor or a reference to one, not float",
        "tensors, or references to such",
    ),
    Limit(
        "Autograd",
        "a reference to something else as a root",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, rpc.remote("w1", abs, (3,)))
""",
        "UsageError",
        "an RRef should contain a tensor for .backward(), not int: roots are tensors",
        "a reference to a tensor",
    ),
    Limit(
        "Autograd",
        "a context that has ended",
        """
with autograd.context() as context_id:
    pass
autograd.get_gradients(context_id)
""",
        "ContextEnded",
        "Could not find autograd context with id: ... on worker 'w0'",
        "ask inside of the `with` block",
    ),
    Limit(
        "Autograd",
        "a second pass over the same graph",
        """
with autograd.context() as context_id:
    loss = there("w1", torch.sin, x).sum()
    autograd.backward(context_id, loss)
    autograd.backward(context_id, loss)
""",
        "RuntimeError",
        "Trying to backward through the graph a second time (or directly access saved tensors after they have",
        "`retain_graph=True` in the first one",
    ),
    Limit(
        "Autograd",
        "a remote call inside of a reentrant checkpoint",
        """
def run(a):
    return there("w1", torch.sin, a)

with autograd.context() as context_id:
    y = torch.utils.checkpoint.checkpoint(run, x * 1, use_reentrant=True)
    autograd.backward(context_id, y.sum())
""",
        "UsageError",
        "the function of a torch.utils.checkpoint with use_reentrant=True leads to a tensor",
        "`use_reentrant=False`",
    ),
    Limit(
        "Autograd",
        "a fast pass in which something that was sent takes no part",
        """
with autograd.context() as context_id:
    y = there("w1", torch.sin, x)
    there("w1", torch.cos, y)
    autograd.backward(context_id, y.sum(), mode="fast")
""",
        "UnusedSends",
        "mode='fast' states that every tensor that was sent takes part in the backward pass, but no gradient",
        '`mode="smart"`, the default',
    ),
    Limit(
        "Autograd",
        "a step that is no distributed optimizer",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, x.sum(), step=torch.optim.SGD([x], lr=1))
""",
        "UsageError",
        "step must be a DistributedOptimizer, not SGD",
        "`DistributedOptimizer`, or its `clipped(...)`",
    ),
    Limit(
        "Modules",
        "`parameters()` of a remote module",
        "remote.parameters()",
        "UsageError",
        "Method ``parameters`` not supported for RemoteModule",
        "`remote_parameters()`",
    ),
    Limit(
        "Modules",
        "`named_parameters()` of a remote module",
        "remote.named_parameters()",
        "UsageError",
        "Method ``named_parameters`` not supported for RemoteModule",
        "`remote_parameters()`, `state_dict()`",
    ),
    Limit(
        "Modules",
        "`buffers()` of a remote module",
        "remote.buffers()",
        "UsageError",
        "Method ``buffers`` not supported for RemoteModule",
        "`state_dict()`",
    ),
    Limit(
        "Modules",
        "`named_buffers()` of a remote module",
        "remote.named_buffers()",
        "UsageError",
        "Method ``named_buffers`` not supported for RemoteModule",
        "`state_dict()`",
    ),
    Limit(
        "Modules",
        "`register_buffer` of a remote module",
        "remote.register_buffer('b', x)",
        "UsageError",
        "Method ``register_buffer`` not supported for RemoteModule",
        "register it in the constructor of the module",
    ),
    Limit(
        "Modules",
        "`register_parameter` of a remote module",
        "remote.register_parameter('p', nn.Parameter(x))",
        "UsageError",
        "Method ``register_parameter`` not supported for RemoteModule",
        "register it in the constructor of the module",
    ),
    Limit(
        "Modules",
        "`add_module` of a remote module",
        "remote.add_module('m', nn.Linear(1, 1))",
        "UsageError",
        "Method ``add_module`` not supported for RemoteModule",
        "add it in the constructor of the module",
    ),
    Limit(
        "Modules",
        "a copy or a pickle of a remote module",
        """
import pickle
pickle.dumps(remote)
""",
        "UsageError",
        "Cannot pickle RemoteModule in python pickler",
        "`state_dict()`",
    ),
    Limit(
        "Modules",
        "`state_dict(keep_vars=True)` of a remote module",
        "remote.state_dict(keep_vars=True)",
        "UsageError",
        "the state of a RemoteModule is a copy: there are no variables of this worker to keep",
        "leave `keep_vars` out",
    ),
    Limit(
        "Modules",
        "attributes of a remote module",
        "remote.weight",
        "AttributeError",
        "RemoteModule has no attribute 'weight'",
        "`get_module_rref().rpc_sync()`, `state_dict()`",
    ),
    Limit(
        "Modules",
        "a constructor that gives no module",
        "RemoteModule('w1', dict)",
        "ValueError",
        "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an",
        "a class of modules, or a function that makes one",
    ),
    Limit(
        "Modules",
        "a device without a worker",
        "RemoteModule('cpu', nn.Linear, (3, 3))",
        "UsageError",
        "remote_device: 'cpu' is no place for a module: it names no worker",
        "`worker/device`",
    ),
    Limit(
        "Modules",
        "a slash without a device",
        "RemoteModule('w1/', nn.Linear, (3, 3))",
        "UsageError",
        "remote_device: 'w1/' is no place for a module: no device stands behind the slash",
        "`worker/device`",
    ),
    Limit(
        "Modules",
        "an unknown device",
        "RemoteModule('w1/gpu', nn.Linear, (3, 3))",
        "UsageError",
        "remote_device: 'w1/gpu' is no place for a module: Expected one of cpu, cuda, ipu, xpu, mkldnn, opengl",
        "`cpu`, `cuda:0`",
    ),
    Limit(
        "Modules",
        "a reference to something else as a module",
        "RemoteModule.init_from_module_rref('w1', rpc.remote('w1', dict))",
        "ValueError",
        "... is a reference to an instance of <class 'dict'>, not of <class nn.Module>",
        "a reference to a module",
    ),
    Limit(
        "Modules",
        "a reference on another worker",
        "RemoteModule.init_from_module_rref('w2', remote.get_module_rref())",
        "UsageError",
        "remote_device: ... is not on worker 'w2', but on 'w1': say so",
        "name its owner",
    ),
    Limit(
        "Optimizers",
        "an optimizer whose step needs a closure",
        "DistributedOptimizer.for_module(torch.optim.LBFGS, remote)",
        "UsageError",
        "LBFGS cannot be used over several workers: its step needs a closure that computes the loss anew",
        "an optimizer that steps once for each pass",
    ),
    Limit(
        "Optimizers",
        "`zero_grad()`",
        "optimizer.zero_grad()",
        "UsageError",
        "DistributedOptimizer has no gradients to set to zero: they belong to the autograd context and go with it",
        "nothing: gradients go with their context",
    ),
    Limit(
        "Optimizers",
        "hooks of `state_dict` and `load_state_dict`",
        "optimizer.register_load_state_dict_post_hook(print)",
        "UsageError",
        "DistributedOptimizer calls no hooks of its state: change what state_dict() gives, or what is loaded",
        "a function of yours around the two",
    ),
    Limit(
        "Optimizers",
        "something that is no optimizer",
        "DistributedOptimizer.for_module(dict, remote)",
        "UsageError",
        "dict is no class of optimizers: it has no step",
        "a class of `torch.optim`",
    ),
    Limit(
        "Optimizers",
        "an optimizer in the place of its class",
        "DistributedOptimizer(torch.optim.SGD([x], lr=1), [rpc.RRef(x)])",
        "UsageError",
        "DistributedOptimizer takes a class of optimizers (optimizer_class), not SGD: write",
        "the class, and its arguments",
    ),
    Limit(
        "Optimizers",
        "parameters that are no references",
        "DistributedOptimizer(torch.optim.SGD, [x], lr=1)",
        "UsageError",
        "DistributedOptimizer takes references to parameters (params_rref), not Tensor",
        "`rpc.RRef(parameter)`, or `for_module`",
    ),
    Limit(
        "Optimizers",
        "no parameters",
        "DistributedOptimizer(torch.optim.SGD, [], lr=1)",
        "InvalidArgument",
        "there is no parameter to optimize: the list of references (params_rref) is empty",
        "one at least",
    ),
    Limit(
        "Optimizers",
        "a model that is no module",
        "DistributedOptimizer.for_module(torch.optim.SGD, 5, lr=1)",
        "UsageError",
        "a model is an nn.Module, a RemoteModule or an RRef to a module, not int",
        "a module, a remote module, or a reference to one",
    ),
    Limit(
        "Optimizers",
        "a model without parameters",
        "DistributedOptimizer.for_module(torch.optim.SGD, nn.ReLU(), lr=1)",
        "UsageError",
        "there is no parameter to optimize: the modules have none, or this optimizer has all of them already",
        "one at least",
    ),
    Limit(
        "Optimizers",
        "an optimizer that is sent",
        "rpc.rpc_sync('w1', id, (optimizer,))",
        "CannotEncode",
        "argument 0 cannot be sent: a DistributedOptimizer cannot be sent or copied: wrap it in an RRef to use",
        "step where it was made",
    ),
    Limit(
        "Optimizers",
        "an optimizer of torch over remote modules",
        "torch.optim.SGD(remote.parameters(), lr=1)",
        "UsageError",
        "Method ``parameters`` not supported for RemoteModule",
        "`DistributedOptimizer.for_module`",
    ),
    Limit(
        "Optimizers",
        "clipping with tensors",
        """
with autograd.context() as context_id:
    clip_grad_norm_(context_id, [x], 1.0)
""",
        "UsageError",
        "clip_grad_norm_ takes a DistributedOptimizer or references (params), not Tensor: write",
        "the optimizer, or references",
    ),
    Limit(
        "Optimizers",
        "clipping an infinite norm, where that shall be an error",
        """
with autograd.context() as context_id:
    autograd.backward(context_id, (remote(x) * float("inf")).sum())
    clip_grad_norm_(context_id, optimizer, 1.0, error_if_nonfinite=True)
""",
        "RuntimeError",
        "the norm of order 2 of the gradients of context ... is inf, so they cannot be clipped",
        "`error_if_nonfinite=False`",
    ),
    Limit(
        "Optimizers",
        "a state with parameters of other names",
        """
state = optimizer.state_dict()
state['param_groups'][0]['params'] = ['other']
optimizer.load_state_dict(state)
""",
        "UsageError",
        "this state is of other parameters, or of others in each group; of one side only: bias, other, weight",
        "the state of the same model",
    ),
    Limit(
        "Optimizers",
        "a state that has no parameter groups",
        "optimizer.load_state_dict({})",
        "InvalidArgument",
        "state_dict must be a dictionary that state_dict() gave, not {}",
        "what `state_dict()` gave",
    ),
]
