"""Who is in a group that has formed: leases, losses, the shutdown barrier, callbacks."""
