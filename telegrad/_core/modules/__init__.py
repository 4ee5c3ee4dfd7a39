"""Modules on other workers, and models with parts on several workers; `telegrad.nn` exports `RemoteModule`."""
