"""One worker's part of a backward pass: the graph that it recorded, and the order in which torch's engine runs it."""
