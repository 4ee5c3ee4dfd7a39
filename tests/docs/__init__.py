"""The pages of the project: their code blocks run, and print what they say."""
