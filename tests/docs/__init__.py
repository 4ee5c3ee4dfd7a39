"""The code blocks of the project's pages run, and print what the pages show."""
