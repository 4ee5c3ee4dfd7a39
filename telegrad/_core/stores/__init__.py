"""Rendezvous stores: torch's stores, sealed with the group's key; finding a store and a directory."""
