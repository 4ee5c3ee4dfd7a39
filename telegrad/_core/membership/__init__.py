"""The members of a group: how they join, generations, leases, failure detection, the shutdown barrier, callbacks."""
