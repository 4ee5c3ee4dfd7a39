"""What a worker can tell of itself, to those who look on: its state, and what has happened lately. An extension."""
