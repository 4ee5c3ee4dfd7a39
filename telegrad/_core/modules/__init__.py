"""Modules that live on other workers, and models with parts on several; `telegrad.nn` hands on `RemoteModule`."""
