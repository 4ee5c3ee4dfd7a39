"""Parts of programs, by subject."""

from tests.twin.parts import calls, gradients, hard, models, objects, pipelines, state, values, weights

__all__ = ["calls", "gradients", "hard", "models", "objects", "pipelines", "state", "values", "weights"]
