"""PyTorch's own tests of its RPC, shipped in the torch wheel, against Telegrad: `python -m tests.conformance`."""
