"""Values as bytes: pickles with their tensors lifted out, functions by name or by value, exceptions with their texts.

The globals of main programs belong here, too: which of them a function needs, and where a worker keeps them.
"""
