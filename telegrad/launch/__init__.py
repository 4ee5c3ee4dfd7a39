"""Start workers: `telegrad.local`, `telegrad run`, and `telegrad worker` for workers without a program of their own."""
