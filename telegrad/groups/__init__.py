"""Groups of workers: calls to all members, barriers, reductions, and groups of references. An extension."""
