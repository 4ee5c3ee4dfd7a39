"""Groups of workers as values: calls to all of them, barriers and reductions, groups of references. An extension."""
