"""Accelerators: stream order, and transfers of memory between devices, hosts and processes."""
