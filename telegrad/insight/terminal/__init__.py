"""What `telegrad top` shows, with Textual."""
