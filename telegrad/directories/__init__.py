"""Directory engines that store a group's directory on other servers: etcd and Redis. An extension."""

MOST_BYTES = 1 << 26  # of a reply of etcd or Redis: another program may have the address
