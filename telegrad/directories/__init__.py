"""Directory engines that store a group's directory on other servers: etcd and Redis. An extension."""
