"""Calls and references as programs use them, and retries; `init_rpc`, which assembles a worker, to `shutdown`.

`telegrad.rpc` exports the public part.
"""
