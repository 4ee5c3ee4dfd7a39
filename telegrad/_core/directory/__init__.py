"""The protocol of a directory, which decides which workers are in a group, and the embedded engine."""
