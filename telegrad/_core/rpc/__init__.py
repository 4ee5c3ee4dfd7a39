"""Remote calls and references as programs use them; `telegrad.rpc` exports the public part."""
