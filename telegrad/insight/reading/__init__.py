"""The states of a group's workers, prepared for commands and pages."""
