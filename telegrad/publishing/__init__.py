"""Values with a name, which are found wherever they live now, and come back elsewhere. An extension."""
