"""Data for other tools: traces, metrics, events, graphs."""
