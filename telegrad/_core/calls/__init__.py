"""Features common to all calls: futures, deadlines, cancelling, call context, names, profiling."""
