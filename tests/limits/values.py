"""What is refused of tensors, functions, references, weights and checkpoints."""

from __future__ import annotations

from tests.limits.page import Limit

LIMITS = [
    Limit(
        "Tensors",
        "a tensor whose memory was freed",
        """
x.data.untyped_storage().resize_(0)
rpc.rpc_sync('w1', id, (x,))
""",
        "CannotEncode",
        "a tensor of shape (3, 3) cannot be sent: it has no memory, or that was freed; send it before its",
        "send it before",
    ),
    Limit(
        "Tensors",
        "a tensor that is written to after its `yield`",
        """
def running():
    total = torch.zeros(3)
    for _ in range(3):
        total += 1
        yield total

list(rpc.rpc_stream("w1", running))
""",
        "UsageError",
        "a tensor of shape (3,) was written to after the stream's function had yielded it: its reader might get",
        "`yield tensor.clone()`",
    ),
    Limit(
        "Tensors",
        "resizing a tensor that has arrived",
        "rpc.rpc_sync('w1', torch.ones, (3,)).resize_(10)",
        "RuntimeError",
        "Trying to resize storage that is not resizable",
        "`clone()` it first",
    ),
    Limit(
        "Functions and values",
        "arguments that are no tuple",
        "rpc.rpc_sync('w1', abs, (3))",
        "InvalidArgument",
        "args must be a tuple with the arguments of the function, not 3 (int); for one argument write args=(x,)",
        "`args=(3,)`",
    ),
    Limit(
        "Functions and values",
        "a function that cannot be called",
        "rpc.rpc_sync('w1', 'abs', (3,))",
        "InvalidArgument",
        "the function to call should be callable, which 'abs' (str) is not; give the function itself, without",
        "the function itself",
    ),
    Limit(
        "Functions and values",
        "a timeout below zero",
        "rpc.rpc_sync('w1', abs, (3,), timeout=-5)",
        "InvalidArgument",
        "timeout must be a number of seconds, 0 for no limit, and at most 1,000,000,000; leave it out for the",
        "seconds; 0 for no limit",
    ),
    Limit(
        "Functions and values",
        "an unknown worker",
        "rpc.rpc_sync('w9', abs, (3,))",
        "UnknownWorker",
        "could not find destination: no worker is named 'w9'",
        "a name of `rpc.workers()`",
    ),
    Limit(
        "Functions and values",
        "a lock, in an argument or a closure",
        """
import threading
rpc.rpc_sync('w1', id, (threading.Lock(),))
""",
        "CannotEncode",
        "argument 0 (_thread.lock) cannot be sent: cannot pickle '_thread.lock' object",
        "what it guards",
    ),
    Limit(
        "Functions and values",
        "an open file",
        """
import sys
rpc.rpc_sync('w1', id, (open(__import__('os').devnull),))
""",
        "CannotEncode",
        "argument 0 (_io.TextIOWrapper) cannot be sent: it belongs to this process, and to no other",
        "its path, or what it holds",
    ),
    Limit(
        "Functions and values",
        "a generator as a result of a call",
        """
def items():
    yield 1

rpc.rpc_sync('w1', items)
""",
        "CannotEncode",
        "the function returned, but its result cannot be sent: a value (builtins.generator) cannot be sent",
        "`rpc_stream`",
    ),
    Limit(
        "Functions and values",
        "a generator as an argument",
        "rpc.rpc_sync('w1', list, ((n for n in range(3)),))",
        "CannotEncode",
        "argument 0 (builtins.generator) cannot be sent: cannot pickle 'generator' object",
        "a list",
    ),
    Limit(
        "Functions and values",
        "a result that cannot be sent",
        """
import threading
rpc.rpc_sync('w1', threading.Lock)
""",
        "CannotEncode",
        "the function returned, but its result cannot be sent: a value (_thread.lock) cannot be sent: cannot",
        "`rpc.remote`, and calls by the reference",
    ),
    Limit(
        "References",
        "a pickle of a reference",
        """
import pickle
pickle.dumps(rpc.RRef(1))
""",
        "UsageError",
        "... can only be sent in the arguments or the result of a remote call; pickled otherwise, nobody would",
        "send it by a call",
    ),
    Limit(
        "References",
        "the value of a reference elsewhere",
        "rpc.remote('w1', dict).local_value()",
        "NotOwner",
        "...: the value is not on this worker",
        "`to_here()`",
    ),
    Limit(
        "References",
        "iterating over a reference",
        "list(rpc.remote('w1', list))",
        "TypeError",
        "'RRef' object is not iterable",
        "`to_here()`",
    ),
    Limit(
        "Actors",
        "a method that waits for a call to its own object",
        """
@rpc.actor
class Loops:
    def first(self, reference):
        return reference.rpc_sync().second()

    def second(self):
        return 1

actor = rpc.remote("w1", Loops)
actor.rpc_sync().first(actor)
""",
        "UsageError",
        "Loops.first waits for a call that calls Loops.second of the same object, and an actor runs one method",
        "do not wait for it, or call `self.second()`",
    ),
    Limit(
        "Weights",
        "a source that has no state",
        "Publisher('number', 5)",
        "InvalidArgument",
        "source must be a module, a state dict, another tree of tensors, or a function that gives one, not 5",
        "a module, a tree of tensors, or a function that gives one",
    ),
    Limit(
        "Weights",
        "a publisher that was closed",
        """
publisher = Publisher('closed', remote)
publisher.close()
publisher.publish()
""",
        "UsageError",
        "the publisher 'closed' was closed, and publishes no more: make a new one",
        "make a new one",
    ),
    Limit(
        "Weights",
        "two publishers of one name",
        "first, second = Publisher('twice', {'x': x}), Publisher('twice', {'x': x})",
        "UsageError",
        "worker 'w0' has a publisher 'twice' already: close that one first, or take another name",
        "another name",
    ),
    Limit(
        "Weights",
        "references in a state",
        "Publisher('references', {'r': rpc.RRef(1)}).publish()",
        "InvalidArgument",
        "weights that are published cannot hold references, as ...",
        "what they refer to",
    ),
    Limit(
        "Weights",
        "a tensor without values",
        "Publisher('meta', {'x': torch.empty(2, device='meta')}).publish()",
        "InvalidArgument",
        "a tensor of shape (2,) cannot be published, since it is on the meta device: publish what it is made of",
        "plain tensors",
    ),
    Limit(
        "Weights",
        "sparse tensors",
        "Publisher('sparse', {'x': torch.eye(2).to_sparse()}).publish()",
        "InvalidArgument",
        "a tensor of shape (2, 2) cannot be published, since it is torch.sparse_coo: publish what it is made of",
        "indices and values",
    ),
    Limit(
        "Weights",
        "rounding to whole numbers",
        "Publisher('rounded', {'x': x}, dtype=torch.int8).publish()",
        "UsageError",
        "'' cannot be published as torch.int8: weights are rounded to floating numbers, such as torch.bfloat16",
        "a floating type",
    ),
    Limit(
        "Weights",
        "a version that does not fit a module",
        """
publisher = Publisher("shapes", nn.Linear(2, 3))
publisher.publish()
Subscriber("w0", "shapes").newest().load_into(nn.Linear(3, 3))
""",
        "InvalidArgument",
        "version ... does not fit: of another shape in it: weight ((3, 3) here, (3, 2) there)",
        "a module of the same names and shapes",
    ),
    Limit(
        "Weights",
        "swapping into a module of another type",
        """
publisher = Publisher("types", nn.Linear(3, 3))
publisher.publish()
Subscriber("w0", "types").newest().swap_into(nn.Linear(3, 3).double())
""",
        "InvalidArgument",
        "version ... cannot be swapped into a module whose tensors are of other types: weight, bias. load_into",
        "`load_into`, which converts",
    ),
    Limit(
        "Weights",
        "a version that is no state dict, into a module",
        """
publisher = Publisher("tree", [x])
publisher.publish()
Subscriber("w0", "tree").newest().load_into(nn.Linear(3, 3))
""",
        "InvalidArgument",
        "version ... is no state dict, but of type list",
        "`version.state`",
    ),
    Limit(
        "Weights",
        "a publisher that never comes",
        "Subscriber('w1', 'nothing', timeout=0.05)",
        "UnknownPublisher",
        "worker 'w1' has no publisher 'nothing', and none has come within 0.05 s; there is none at all",
        "make it there, and keep it",
    ),
    Limit(
        "Weights",
        "a part that is no part of a tensor",
        """
def parts():
    return {"x": Shard(torch.ones(3), (2,), (4,))}

ShardedPublisher("parts", {"w1": parts}).publish()
""",
        "InvalidArgument",
        "'x' is no part of a tensor of shape (4,): it begins at (2,), and has (3,)",
        "what lies inside of the whole tensor",
    ),
    Limit(
        "Weights",
        "a rank that nobody publishes",
        """
publisher = ShardedPublisher("spread", remote)
publisher.publish()
ShardedSubscriber("w0", "spread", {"other": None}).newest()
""",
        "UsageError",
        "nobody publishes other; there are bias, weight",
        "a name that is published",
    ),
    Limit(
        "Checkpoints",
        "a state that is no dictionary",
        "checkpoint.save(remote, folder)",
        "UsageError",
        "the state of a checkpoint is a dictionary by names, not RemoteModule(Linear on w1/cpu): write",
        '`{"model": model}`',
    ),
    Limit(
        "Checkpoints",
        "a folder that is no path",
        "checkpoint.save({'model': remote}, 5)",
        "UsageError",
        "a checkpoint is in a folder: give its path (checkpoint_id), not 5",
        "its path",
    ),
    Limit(
        "Checkpoints",
        "loading where nothing was saved",
        "checkpoint.load({'model': remote}, folder)",
        "UsageError",
        "there is no complete checkpoint in ...: [Errno 2] No such file or directory: ...",
        "`checkpoint.latest(folder)` tells whether there is one",
    ),
    Limit(
        "Checkpoints",
        "loading what was not saved",
        """
checkpoint.save({'step': 1}, folder)
checkpoint.load({'model': remote}, folder)
""",
        "UsageError",
        "the checkpoint in ... has no model.bias, model.weight",
        "the names that were saved",
    ),
]
