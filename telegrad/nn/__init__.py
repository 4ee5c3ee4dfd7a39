"""Modules on other workers: `telegrad.nn`."""

from telegrad._core.modules.remote_module import RemoteModule
from telegrad.pipeline import Pipeline

__all__ = ["Pipeline", "RemoteModule"]
