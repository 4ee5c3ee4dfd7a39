"""Joining a group: rendezvous of fixed groups, generations of elastic ones."""
