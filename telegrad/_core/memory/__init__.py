"""Memory of tensors that crosses a connection: shared between processes of a host, or received into warm memory."""
