"""Messages between two workers as bytes: frames, the fields of each kind of message, tensors taken apart."""
