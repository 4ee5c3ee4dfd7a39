"""Remote calls and references as programs use them, and retries; `telegrad.rpc` exports the public part."""
