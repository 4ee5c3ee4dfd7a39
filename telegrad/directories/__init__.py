"""Engines that keep the directory of a group on other servers: etcd and Redis. An extension."""
