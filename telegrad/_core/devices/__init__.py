"""Accelerators: device maps, the order of streams, and memory on its way between devices, hosts and processes."""
