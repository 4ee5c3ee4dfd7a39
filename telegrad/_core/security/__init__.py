"""Who may take part: the keys of a group, the handshake of a connection, encrypted records, TLS."""
