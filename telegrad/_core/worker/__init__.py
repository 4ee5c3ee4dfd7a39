"""A worker: combines an agent, references and backward passes; functions that run at a value's owner."""
