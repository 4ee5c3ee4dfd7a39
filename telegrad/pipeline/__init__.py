"""Pipelines: a model in stages on several workers, fed with micro-batches. An extension."""
