"""Features common to all calls: options, futures, deadlines, cancelling, call context, names, profiling."""
