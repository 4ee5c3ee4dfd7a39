"""The members of a group that has formed: leases, failure detection, the shutdown barrier, callbacks."""
