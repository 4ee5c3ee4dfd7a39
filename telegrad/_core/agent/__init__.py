"""The agent of a worker: makes and serves remote calls over its connections."""
