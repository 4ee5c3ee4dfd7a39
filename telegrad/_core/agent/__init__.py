"""Remote calls: made and answered by the agent of a worker, over the connections that it keeps."""
