"""`telegrad run`: start the workers of this host by their roles, and restart failed ones."""
