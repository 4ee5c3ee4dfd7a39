"""Where workers meet: rendezvous stores, sealed with the group's key, and directories, which decide about members.

A directory has a protocol, an embedded engine with a client and a server, and an entry in the store that leads to it.
"""
