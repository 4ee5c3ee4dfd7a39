"""How versions of weights travel: their layout in memory, differences, chains of subscribers, messages."""
