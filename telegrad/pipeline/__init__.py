"""Pipelines: a model divided into stages on several workers, which process micro-batches. An extension."""
