"""`telegrad run`: workers of this host, by their roles, that are started again when they fail."""
