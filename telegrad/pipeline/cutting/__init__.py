"""Cut models into stages by their graph, and compare the stages with the model."""
