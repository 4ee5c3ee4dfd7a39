"""Rendezvous stores: torch's stores, sealed with the group's key; addresses; and finding a directory."""
