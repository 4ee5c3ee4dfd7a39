"""The states of all workers of a group, as a command or a page looks at them."""
