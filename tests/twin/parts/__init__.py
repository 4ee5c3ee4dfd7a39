"""The kinds of things that programs do, by subject."""

from tests.twin.parts import calls, gradients, models, state, values, weights

__all__ = ["calls", "gradients", "models", "state", "values", "weights"]
