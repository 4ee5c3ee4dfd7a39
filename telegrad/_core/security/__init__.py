"""Access to a group: its keys, the handshake of connections, encrypted records, TLS."""
