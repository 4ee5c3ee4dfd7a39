"""Encoding of messages between two workers: frames, message fields, and serialized tensors."""
