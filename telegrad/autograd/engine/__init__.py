"""One worker's part of a backward pass: the recorded graph, and the order in which torch's engine runs it."""
