"""The protocol of a directory, which decides who is in a group, and the embedded engine that serves one.

Its clients import `protocol`; engines on other servers stand in `telegrad.directories`.
"""
