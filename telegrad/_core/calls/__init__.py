"""What every call has, whoever runs it: futures, deadlines, cancelling, context, names, profiling."""
