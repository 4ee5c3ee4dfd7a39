"""Where workers meet: stores of torch, sealed by the group's key, addresses, and the way to a directory."""
