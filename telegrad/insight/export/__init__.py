"""What other tools read: traces, metrics, events, graphs."""
