"""The core of Telegrad: messages, connections, membership, calls and references. Private.

In this folder itself stands what every part needs and what knows no other part: forks, signals, threads, checks of
arguments, texts for users. The folders below import one another in one direction only, in the order of
`tests/test_imports.py`. Extensions import `telegrad.ext` instead.
"""
