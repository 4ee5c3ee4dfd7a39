"""Remote calls and references as programs use them: `telegrad.rpc` hands on what is public here."""
