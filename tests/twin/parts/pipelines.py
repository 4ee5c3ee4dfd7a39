"""Models in stages, which are fed with micro-batches."""

from tests.twin.making import INSIDE, OUTSIDE, Maker, part
from tests.twin.parts.models import OPTIMIZERS, layer


def steps(m: Maker, model: str) -> None:
    """Train a pipeline, and record its outputs in evaluation mode."""
    optimizer, c = m.fresh("optimizer"), m.fresh("c")
    m.line(f"{optimizer} = DistributedOptimizer.for_module({m.draw.choice(OPTIMIZERS).format(params=model)})")
    for _ in range(m.draw.randrange(1, 4)):
        inputs = m.choose(f"draw({m.number()}, 5, 3)", f"leaf({m.number()}).sin()", f"draw({m.number()})")
        size = "5, 3" if "5, 3" in inputs else "3, 3"
        loss = m.choose("nn.functional.mse_loss", "nn.L1Loss()", "lambda out, to: ((out - to) ** 2).mean()")
        rides = m.draw.random() < 0.3
        given = f"{c}, {inputs}, draw({m.number()}, {size}), {loss}{f', step={optimizer}' if rides else ''}"
        m.line(f"with autograd.context() as {c}:\n    see('loss', {model}.forward_backward({given}))")
        if not rides:
            m.line(f"    {m.choose(f'clip_grad_norm_({c}, {optimizer}, 0.5)', 'pass')}")
            m.line(f"    {optimizer}.step({c})")
        m.line(f"    everywhere(see_gradients, 'gradients of {c}', {c})")
    m.line(f"{model}.eval()")
    m.line(f"with torch.no_grad():\n    see('{model}', {model}(draw({m.number()})))")
    m.see(f"sorted({model}.state_dict().items())")


def by_hand(m: Maker, places: list[str]) -> str:
    """Make a pipeline with a stage on each of the given workers."""
    model, stages = m.fresh("model"), []
    for place in places:
        cls, stage = layer(m), m.fresh("stage")
        m.line(f"{stage} = RemoteModule({place!r}, {cls}, ({m.number()},))")
        stages.append(stage)
    if m.draw.random() < 0.3:
        stages.append(f"nn.Sequential({layer(m)}({m.number()}), nn.Identity())")
    schedule = m.choose("1f1b", "gpipe", "zero-bubble")
    m.line(f"{model} = Pipeline([{', '.join(stages)}], chunks={m.draw.randrange(1, 5)}, schedule={schedule!r})")
    return model


@part(OUTSIDE)
def pipeline_by_hand(m: Maker) -> None:
    steps(m, by_hand(m, m.draw.sample(m.names, m.draw.randrange(1, len(m.names) + 1))))


@part(INSIDE)
def pipeline_in_a_context(m: Maker) -> None:
    m.gain(f"{by_hand(m, m.draw.sample(m.names, 2))}({m.tensor()})")


@part(OUTSIDE)
def pipeline_of_a_sequence(m: Maker) -> None:
    model, pipeline, whole = m.fresh("model"), m.fresh("pipeline"), m.fresh("whole")
    workers = [m.draw.choice(m.names) for _ in range(m.draw.choice([2, 2, 3]))]
    layers = [f"{layer(m)}({m.number()})" for _ in range(3)]
    layers += m.draw.sample(["nn.Tanh()", "nn.Linear(3, 3).double()", "nn.BatchNorm1d(3).double().eval()"], 2)
    m.draw.shuffle(layers)
    m.line(f"torch.manual_seed({m.number()})\n{model} = nn.Sequential({', '.join(layers)})")
    how = m.choose("", ", at=['2', '4']" if len(workers) == 3 else ", at=['3']")
    m.line(f"{pipeline} = Pipeline.split({model}, {workers}{how}, chunks={m.draw.randrange(1, 5)})")
    steps(m, pipeline)
    m.line(f"{whole} = {model}.load_state_dict({pipeline}.state_dict())")
    m.see(f"{model}.eval()(draw({m.number()}))")


@part(OUTSIDE, rarely=True)
def pipeline_of_a_recorded_model(m: Maker) -> None:
    cls, model, pipeline = m.fresh("Net"), m.fresh("model"), m.fresh("pipeline")
    norm = m.choose("LayerNorm", "BatchNorm1d")
    tied = m.choose("self.last.weight = self.first.weight", "pass")
    m.define(
        f"""class {cls}(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.norm = nn.{norm}(3, dtype=torch.float64)
        self.last = nn.Linear(3, 3, dtype=torch.float64)
        {tied}

    def forward(self, x):
        y = self.first(x).{m.choose("tanh", "sin")}()
        if self.training:
            y = y * 0.5
        return self.last(self.norm(y)) + {m.choose("x", "y", "0.1")}"""
    )
    m.line(f"torch.manual_seed({m.number()})\n{model} = {cls}()")
    workers = [m.draw.choice(m.names) for _ in range(2)]
    chunks = m.choose("1", "2") if norm == "LayerNorm" else "1"  # a batch of a single sample cannot be normalized
    how = f"at=['{m.choose('norm', 'last')}'], chunks={chunks}, example=draw({m.number()}, 4, 3)"
    m.line(f"{pipeline} = Pipeline.split({model}, {workers}, {how})")
    steps(m, pipeline)
    m.line(f"{model}.load_state_dict({pipeline}.state_dict())")
    m.see(f"{model}.eval()(draw({m.number()}))")
