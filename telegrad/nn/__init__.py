"""Modules that live on other workers: `telegrad.nn`."""

from telegrad.nn.pipeline import Pipeline
from telegrad.nn.remote_module import RemoteModule

__all__ = ["Pipeline", "RemoteModule"]
