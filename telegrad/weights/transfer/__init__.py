"""The transfer of versions of weights: memory layout, deltas, chains of subscribers, messages."""
