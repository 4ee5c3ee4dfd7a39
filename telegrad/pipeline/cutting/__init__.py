"""Models cut into stages by their graph, and a proof that the stages compute what the model does."""
