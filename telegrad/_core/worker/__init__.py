"""A worker: its agent, references and backward passes put together; and what runs where a value lives."""
