"""Resources and limits of the host: private and secret files, open files, memory."""
