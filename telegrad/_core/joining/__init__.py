"""Joining a group: launchers, rendezvous of fixed groups, generations of elastic ones."""
