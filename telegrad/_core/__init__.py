"""The core of Telegrad: messages, connections, membership, calls and references. Private.

The modules of this folder itself (forks, signals, threads, processes, private files, argument checks, texts for users)
are used by all parts and import none of them. The folders below import one another in one direction only, in the order
of `tests/test_imports.py`. Extensions import `telegrad.ext` instead.
"""
