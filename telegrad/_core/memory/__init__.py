"""Memory of tensors that are sent over a connection: shared memory on one host, reused receive buffers, accelerators.

Device streams order the work on accelerators that the threads of a worker submit.
"""
