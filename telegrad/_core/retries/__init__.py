"""Retries: calls that wait for their worker, or are repeated after a failure and run only once."""
