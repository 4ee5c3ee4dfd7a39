"""Tensors, functions, references, weights and checkpoints that are refused; `page.py` explains the form of the rows."""

REFUSED = {
    "Tensors": """
## a nested tensor, a `DTensor` or another made of others, that requires a gradient, in a context
with autograd.context():
    nested = torch.nested.as_nested_tensor([torch.ones(2, requires_grad=True), torch.ones(3)], layout=torch.jagged)
    rpc.rpc_sync("w1", echo, (nested,))
CannotEncode: a tensor of the type NestedTensor that requires a gradient cannot be sent in an autograd context
-> `tensor.values()`, `tensor.unbind()`, `tensor.to_local()`
## a sparse CSR leaf that requires a gradient, in a pass
matrix = torch.eye(3).to_sparse_csr().requires_grad_()
with autograd.context() as context_id:
    autograd.backward(context_id, there("w1", torch.matmul, matrix, x).sum())
RuntimeError: Sparse CSR tensors do not have strides
-> `to_sparse()` (COO), or its values
## `UninitializedParameter`, in a context
with autograd.context():
    rpc.rpc_sync("w1", echo, (nn.UninitializedParameter(),))
CannotEncode: a tensor of the type UninitializedParameter that requires a gradient cannot be sent in an autograd context
-> make the lazy module there
## tensors of `functionalize`
rpc.rpc_sync("w1", echo, (torch._to_functional_tensor(torch.ones(3)),))
CannotEncode: a tensor of shape (3,) cannot be sent: it has no memory, or its memory was freed
-> it inside of the function that is called
## `torch.finfo`, `torch.iinfo`
rpc.rpc_sync("w1", echo, (torch.finfo(torch.float16),))
CannotEncode: argument 0 (torch.finfo) cannot be sent: cannot pickle 'torch.finfo' object
-> the data type
## a tensor whose memory was freed
x.data.untyped_storage().resize_(0)
rpc.rpc_sync('w1', id, (x,))
CannotEncode: a tensor of shape (3, 3) cannot be sent: it has no memory, or its memory was freed; send it before its
-> send it before
## a nested tensor without parts
rpc.rpc_sync('w1', id, (torch.nested.nested_tensor([]),))
CannotEncode: a nested tensor without parts cannot be sent, since torch cannot load it; send []
-> `[]`
## resizing a tensor that has arrived
rpc.rpc_sync('w1', torch.ones, (3,)).resize_(10)
RuntimeError: Trying to resize storage that is not resizable
-> `clone()` it first
## a nested tensor of the strided layout that requires a gradient, in a context
with autograd.context():
    there("w1", echo, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True))
UsageError: a nested tensor that requires a gradient cannot be sent in an autograd context: send the list of its parts
-> `tensor.unbind()`
## jagged tensors of one raggedness that arrive in several messages, combined
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
there("w1", echo, ragged) + ragged
RuntimeError: cannot call binary pointwise function add.Tensor with inputs of shapes
-> send them in one call, or their `values()`
""",
    "Functions and values": """
## arguments that are no tuple
rpc.rpc_sync('w1', abs, (3))
InvalidArgument: args must be a tuple with the arguments of the function, not 3 (int); for one argument write args=(x,)
-> `args=(3,)`
## a function that cannot be called
rpc.rpc_sync('w1', 'abs', (3,))
InvalidArgument: the function to call should be callable, but 'abs' (str) is not; give the function itself, without
-> the function itself
## a timeout below zero
rpc.rpc_sync('w1', abs, (3,), timeout=-5)
InvalidArgument: timeout must be a number of seconds, 0 for no limit, and at most 1,000,000,000; leave it out for the
-> seconds; 0 for no limit
## an unknown worker
rpc.rpc_sync('w9', abs, (3,))
UnknownWorker: could not find destination: no worker is named 'w9'
-> a name of `rpc.workers()`
## a lock, in an argument or a closure
import threading
rpc.rpc_sync('w1', id, (threading.Lock(),))
CannotEncode: argument 0 (_thread.lock) cannot be sent: cannot pickle '_thread.lock' object
-> what it guards
## an open file
import sys
rpc.rpc_sync('w1', id, (open(__import__('os').devnull),))
CannotEncode: argument 0 (_io.TextIOWrapper) cannot be sent: it belongs to this process only
-> its path, or what it holds
## a generator as a result of a call
def items():
    yield 1

rpc.rpc_sync('w1', items)
CannotEncode: the function returned, but its result cannot be sent: a value (builtins.generator) cannot be sent
-> `rpc_stream`
## a generator as an argument
rpc.rpc_sync('w1', list, ((n for n in range(3)),))
CannotEncode: argument 0 (builtins.generator) cannot be sent: cannot pickle 'generator' object
-> a list
## a result that cannot be sent
import threading
rpc.rpc_sync('w1', threading.Lock)
CannotEncode: the function returned, but its result cannot be sent: a value (_thread.lock) cannot be sent: cannot
-> `rpc.remote`, and calls by the reference
## a process group of `torch.distributed`
one_process()
there("w1", echo, dist.group.WORLD)
CannotEncode: argument 0 (torch.distributed.distributed_c10d.ProcessGroup) cannot be sent: cannot pickle
-> make it there
## `torch.futures.Future`
there("w1", echo, torch.futures.Future())
CannotEncode: argument 0 (torch.jit.Future) cannot be sent:
-> what it will have
## `torch.Stream`
there("w1", echo, torch.Stream(device='cpu'))
CannotEncode: argument 0 (torch.Stream) cannot be sent:
-> [devices](devices.md) of workers
## `torch.Event`
there("w1", echo, torch.Event(device='cpu'))
CannotEncode: argument 0 (torch.Event) cannot be sent:
-> [devices](devices.md) of workers
## a node of a graph
there("w1", echo, x.sin().grad_fn)
CannotEncode: argument 0 (builtins.SinBackward0) cannot be sent:
-> the tensor
## an edge of a graph
there("w1", echo, torch.autograd.graph.get_gradient_edge(x))
CannotEncode: argument 0[0] (builtins.AccumulateGrad) cannot be sent:
-> the tensor
""",
    "References": """
## a pickle of a reference
import pickle
pickle.dumps(rpc.RRef(1))
UsageError: ... can only be sent in the arguments or the result of a remote call, because a pickled reference
-> send it by a call
## the value of a reference elsewhere
rpc.remote('w1', dict).local_value()
NotOwner: ...: the value is not on this worker
-> `to_here()`
## iterating over a reference
list(rpc.remote('w1', list))
TypeError: 'RRef' object is not iterable
-> `to_here()`
""",
    "Actors": """
## a method that waits for a call to its own object
@rpc.actor
class Loops:
    def first(self, reference):
        return reference.rpc_sync().second()

    def second(self):
        return 1

actor = rpc.remote("w1", Loops)
actor.rpc_sync().first(actor)
UsageError: Loops.first waits for a call that calls Loops.second of the same object, and an actor runs one method
-> do not wait for it, or call `self.second()`
""",
    "Weights": """
## a source that has no state
Publisher('number', 5)
InvalidArgument: source must be a module, a state dict, another tree of tensors, or a function that returns one, not 5
-> a module, a tree of tensors, or a function that returns one
## a publisher that was closed
publisher = Publisher('closed', remote)
publisher.close()
publisher.publish()
UsageError: the publisher 'closed' was closed and cannot publish: create a new one
-> create a new one
## two publishers of one name
first, second = Publisher('twice', {'x': x}), Publisher('twice', {'x': x})
UsageError: worker 'w0' has a publisher 'twice' already: close it first, or use another name
-> another name
## references in a state
Publisher('references', {'r': rpc.RRef(1)}).publish()
InvalidArgument: published weights cannot contain references such as <RRef ...
-> what they refer to
## a tensor without values
Publisher('meta', {'x': torch.empty(2, device='meta')}).publish()
InvalidArgument: a tensor of shape (2,) cannot be published, because it is on the meta device: publish its parts
-> plain tensors
## sparse tensors
Publisher('sparse', {'x': torch.eye(2).to_sparse()}).publish()
InvalidArgument: a tensor of shape (2, 2) cannot be published, because it is torch.sparse_coo: publish its parts
-> indices and values
## rounding to whole numbers
Publisher('rounded', {'x': x}, dtype=torch.int8)
InvalidArgument: dtype must be a type of floating numbers, or a function of a name and a tensor, not 'torch.int8'
-> a floating type
## a version that does not fit a module
publisher = Publisher("shapes", nn.Linear(2, 3))
publisher.publish()
Subscriber("w0", "shapes").newest().load_into(nn.Linear(3, 3))
InvalidArgument: version ... does not fit: of another shape in it: weight ((3, 3) here, (3, 2) there)
-> a module of the same names and shapes
## swapping into a module of another type
publisher = Publisher("types", nn.Linear(3, 3))
publisher.publish()
Subscriber("w0", "types").newest().swap_into(nn.Linear(3, 3).double())
InvalidArgument: version ... cannot be swapped into a module whose tensors have other types: weight, bias. load_into
-> `load_into`, which converts
## a version that is no state dict, into a module
publisher = Publisher("tree", [x])
publisher.publish()
Subscriber("w0", "tree").newest().load_into(nn.Linear(3, 3))
InvalidArgument: version ... is not a state dict, but of type list
-> `version.state`
## a publisher that never comes
Subscriber('w1', 'nothing', timeout=0.05)
UnknownPublisher: worker 'w1' has no publisher 'nothing', and none was created within 0.05 s; it has no publishers
-> create it there, and keep it
## a part that is no part of a tensor
def parts():
    return {"x": Shard(torch.ones(3), (2,), (4,))}

ShardedPublisher("parts", {"w1": parts}).publish()
InvalidArgument: 'x' is not a part of a tensor of shape (4,): its offsets are (2,), and its sizes (3,)
-> what lies inside of the whole tensor
## a rank that no worker publishes
publisher = ShardedPublisher("spread", remote)
publisher.publish()
ShardedSubscriber("w0", "spread", {"other": None}).newest()
UsageError: no worker publishes other; the published names are bias, weight
-> a name that is published
""",
    "Checkpoints": """
## a state that is no dictionary
checkpoint.save(remote, folder)
UsageError: the state of a checkpoint must be a dictionary by names, not RemoteModule(Linear on w1/cpu): write
-> `{"model": model}`
## a folder that is no path
checkpoint.save({'model': remote}, 5)
UsageError: a checkpoint is saved in a folder: give its path (checkpoint_id), not 5
-> its path
## loading where nothing was saved
checkpoint.load({'model': remote}, folder)
UsageError: there is no complete checkpoint in ...: [Errno 2] No such file or directory: ...
-> `checkpoint.latest(folder)` tells whether there is one
## loading what was not saved
checkpoint.save({'step': 1}, folder)
checkpoint.load({'model': remote}, folder)
UsageError: the checkpoint in ... has no model.bias, model.weight
-> the names that were saved
## loading over a tensor of another shape or type
checkpoint.save({'w': torch.ones(2, 3)}, folder)
checkpoint.load({'w': torch.ones(3, 2)}, folder)
UsageError: w in the state is a torch.float32 tensor of shape (3, 2), and a torch.float32 tensor of shape (2, 3) in the
-> a tensor like the saved one, or None to get that
## loading into a model of another shape or type
checkpoint.save({'model': nn.Linear(2, 3)}, folder)
checkpoint.load({'model': RemoteModule("w1", nn.Linear, (2, 4))}, folder)
UsageError: model.weight on worker 'w1' is a torch.float32 tensor of shape (4, 2), and a torch.float32 tensor of
-> a model of the saved form, converted afterwards
## loading over a tensor whose elements share memory
checkpoint.save({'w': torch.ones(2, 3)}, folder)
checkpoint.load({'w': torch.ones(3).expand(2, 3)}, folder)
UsageError: elements of w in the state share memory: give a tensor without overlaps, as by clone()
-> `clone()`
## saving sparse, nested, quantized, meta and lazy tensors
checkpoint.save({'model': {'mask': torch.eye(3).to_sparse()}}, folder)
UsageError: a checkpoint cannot contain model.mask, a torch.sparse_coo tensor: save a dense tensor
-> a dense tensor
## two values of one name
checkpoint.save({'model': {'weight': 1}, 'model.weight': 2}, folder)
UsageError: the keys 'model' and 'model.weight' of the state both have a value 'model.weight' in the checkpoint
-> other keys
""",
}
