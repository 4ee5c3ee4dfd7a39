"""What a group does: why it waits, where the time goes, what it costs."""
