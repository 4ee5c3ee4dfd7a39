"""Serialization: pickles with tensors apart, functions by name or by value, exceptions with remote tracebacks.

This folder also handles the globals of main programs: which of them a function needs, and where a worker keeps them.
"""
