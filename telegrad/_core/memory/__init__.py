"""Memory of tensors that are sent over a connection: shared memory on one host, or reused receive buffers."""
