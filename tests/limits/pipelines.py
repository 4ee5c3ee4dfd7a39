"""Uses of pipelines that are refused; `page.py` describes the form of the rows."""

REFUSED = {
    "Pipelines": """
## no stages
Pipeline([])
UsageError: a pipeline needs at least one stage, and `stages` is an empty list
-> one at least
## a stage that is no module
Pipeline([abs])
UsageError: a stage is a RemoteModule, a reference to a module or a module of this worker, not <built-in function
-> a module, a remote module or a reference to one
## an unknown schedule
Pipeline([remote], schedule='fast')
InvalidArgument: schedule must be one of 'gpipe', '1f1b', 'interleaved', 'zero-bubble', not 'fast'
-> one of those that it names
## a batch that does not begin with its samples
with autograd.context() as context_id:
    pipeline.forward_backward(context_id, torch.tensor(1.0), x, nn.functional.mse_loss)
UsageError: a batch must consist of tensors with the samples along their first dimension, the same number in each
-> tensors with the samples along their first dimension
## other numbers of inputs and of targets
with autograd.context() as context_id:
    pipeline.forward_backward(context_id, x, x[:2], nn.functional.mse_loss)
UsageError: 3 inputs and 2 targets cannot be cut into 2 matching micro-batches: give a target for each
-> a target for each input
## a loss for each sample
with autograd.context() as context_id:
    pipeline.forward_backward(context_id, x, x, nn.MSELoss(reduction="none"))
UsageError: MSELoss() gives a loss for each sample, and a pipeline needs a scalar: create it with reduction='mean' or
-> `reduction="mean"` or `"sum"`
## a class in the place of a loss
with autograd.context() as context_id:
    pipeline.forward_backward(context_id, x, x, nn.MSELoss)
UsageError: the loss of a pipeline is called with outputs and targets: pass an instance, MSELoss(), not
-> an instance
## a loss that is no scalar
with autograd.context() as context_id:
    pipeline.forward_backward(context_id, x, x, torch.sub)
UsageError: the loss of a pipeline must be a scalar tensor, but _VariableFunctionsClass.sub returned a tensor of shape
-> `.mean()`, or `.sum()` with `reduction="sum"`
## two reductions
with autograd.context() as context_id:
    pipeline.forward_backward(context_id, x, x, nn.MSELoss(), reduction="sum")
UsageError: forward_backward got reduction='sum', but MSELoss() has reduction='mean': leave out the argument
-> leave the argument out
## references between stages
class Gives(nn.Module):
    def forward(self, a):
        return rpc.RRef(a)

Pipeline([RemoteModule("w1", Gives), RemoteModule("w2", nn.Identity)])(x)
UsageError: values between the stages of a Pipeline cannot contain references such as <RRef ...: let the stage fetch
-> `to_here()` in the stage
## tied parameters that are not named together
Pipeline([remote, remote], tied=['0.weight'])
InvalidArgument: tied must be a list of lists of names, such as [('0.embedding.weight', '2.head.weight')], not
-> `tied=[("0.weight", "1.weight")]`
## tied parameters that are not there
tied = Pipeline([remote, nn.Linear(3, 3)], tied=[("0.weights", "1.weight")])
with autograd.context() as context_id:
    tied.forward_backward(context_id, x, x, nn.functional.mse_loss)
UsageError: stage 1 of 2 of a Pipeline (Linear) has no parameter 'weights' that could be tied; it has weight, bias
-> names of parameters
## freezing a tied parameter through a later stage
second = nn.Linear(3, 3)
tied = Pipeline([remote, second], tied=[("0.weight", "1.weight")])
second.requires_grad_(False)
with autograd.context() as context_id:
    tied.forward_backward(context_id, x, x, nn.functional.mse_loss)
UsageError: stage 2 of 2 of a Pipeline (Linear) was frozen after its weight 'weight' was tied to '0.weight', which is
-> the first stage
## tied parameters of other shapes
tied = Pipeline([remote, nn.Linear(3, 4)], tied=[("0.weight", "1.weight")])
with autograd.context() as context_id:
    tied.forward_backward(context_id, x, x[:, :1], lambda a, b: a.sum())
UsageError: stage 2 of 2 of a Pipeline (Linear): its parameter 'weight' has the shape (4, 3), and cannot be tied to
-> parameters of one shape
## splitting at both a module and a balance
Pipeline.split(model, ['w1', 'w2'], at=['1'], balance=[1, 1])
UsageError: give either `at` or `balance` to say where a model is cut, not both
-> one of them
## splitting at a module that is not there
Pipeline.split(model, ['w1', 'w2'], at=['9'])
UsageError: the model has no module '9' with which a stage could begin
-> a name of `named_modules()`
## too few places to split at
Pipeline.split(model, ['w1', 'w2'], at=[])
UsageError: `at` names the first module of each stage, except for the first stage: for 2 workers 1, not 0
-> one less than workers
## a balance that does not count all children
Pipeline.split(model, ['w1', 'w2'], balance=[1, 1])
UsageError: `balance` must distribute all 3 children over the 2 stages, at least one for each: [1, 1] does not
-> all children of the `nn.Sequential`
## more workers than parts
Pipeline.split(nn.Sequential(nn.Linear(3, 3)), ['w1', 'w2'])
UsageError: the model cannot be cut automatically into 2 stages: after the first, stages can only begin with []. Name
-> fewer workers
## splitting a forward that depends on values of tensors
split(lambda m, value: m.b(value) if m.a(value).sum() > 0 else value)
UsageError: Two cannot be cut at 'b', as torch.export cannot record its forward in training:
-> stages by hand
## a stage that would begin inside of `no_grad` or autocast
def forward(m, value):
    with torch.no_grad():
        value = m.a(value)
    return m.b(value)
split(forward, at="a")
UsageError: the stages of Two differ from the model in training
-> a module that is called outside of it
## splitting a model with hooks
model.register_forward_hook(lambda *_: None)
Pipeline.split(model, ["w1", "w2"], at=["2"])
UsageError: '' (Sequential) has hooks, and is cut: nothing would call them. Remove them first, or build the stages
-> hooks of the modules inside of it
## splitting at a module that is not called
split(lambda m, value: m.b(m.a(value)), at="norm")
UsageError: 'norm' is not called directly, or is called in torch.no_grad() or autocast: begin the stage with another
-> a module that the forward calls
## stages that are named out of order
Pipeline.split(model, ['w1', 'w2', 'w1'], at=['2', '1'])
UsageError: stages must follow the order in which their modules are called: name them in the order ['1', '2']
-> in the order in which they are called
## a balance of a model that is no `nn.Sequential`
Pipeline.split(Two(lambda m, value: m.b(m.a(value))), ["w1", "w2"], balance=[1, 1])
UsageError: `balance` counts the children of an nn.Sequential, and Two is not one: name the modules
-> `at`
## splitting a forward without an argument
class Constant(Two):
    def forward(self):
        return self.b(self.a(torch.ones(3)))

Pipeline.split(Constant(None), ["w1", "w2"], at=["b"], example=x)
UsageError: Constant.forward has no named argument, so a pipeline does not know what to pass: wrap the model in
-> name what the forward takes
## an interleaved schedule whose stages do not go around
uneven = Pipeline([remote, remote, RemoteModule("w2", nn.Linear, (3, 3))], schedule="interleaved")
with autograd.context() as context_id:
    uneven.forward_backward(context_id, x, x, nn.functional.mse_loss)
UsageError: an interleaved schedule needs stages that go around all workers in turn, the same number on each, such
-> stages in turn, the same number on each worker
## splitting a model that is no `nn.Sequential` without an example
split(lambda m, value: m.b(m.a(value)), example=None)
UsageError: Two is not an nn.Sequential that is cut between its children, so its forward must be recorded, which needs
-> `example=inputs`
## an example that does not begin with its samples
split(lambda m, value: m.b(m.a(value)), example=torch.tensor(1.0))
UsageError: `example` must consist of tensors with the samples along their first dimension, the same number in each
-> a few samples
## splitting a forward that changes Python state
def forward(m, value):
    m.calls += 1
    return m.b(m.a(value))
split(forward)
UsageError: the forward pass of Two changes
-> a buffer
## a buffer that one stage changes and another one uses
def forward(m, value):
    m.state.add_(1)
    return m.b(m.a(value) + m.state) * m.state
split(forward)
UsageError: 'state' is changed in place (
-> use it in one stage only
## splitting a forward with activation checkpoints
split(lambda m, value: torch.utils.checkpoint.checkpoint(m.b, m.a(value), use_reentrant=False))
UsageError: the forward pass uses activation checkpointing, or other saved_tensors_hooks, which cannot be recorded
-> more micro-batches
## a micro-batch of another data type than the example's
cut = split(lambda m, value: m.b(m.a(value)))
cut(torch.ones(3, 3).double())
UsageError: Two was cut with an example, and its recorded forward does not fit this micro-batch: it has a tensor of
-> a similar example
## a micro-batch of one sample, in training, of a model that does not take one
cut = split(lambda m, value: m.b(m.norm(m.a(value))))
cut(torch.ones(1, 3))
UsageError: Two was cut with an example, and its recorded forward does not fit this micro-batch: sizes of 0 and 1 may be
-> fewer `chunks`
## another data type for a model that was recorded
split(lambda m, value: m.b(m.a(value))).double()
UsageError: the data types of a model are recorded when it is cut: change them before Pipeline.split, not after
-> change it before
## gradients of tied weights of several workers in a backward pass of one's own
tied = Pipeline([remote, nn.Linear(3, 3)], tied=[("0.weight", "1.weight")])
with autograd.context():
    tied(x)
UsageError: gradients of weights that are tied across workers are only summed in forward_backward
-> `forward_backward`
"""
}
