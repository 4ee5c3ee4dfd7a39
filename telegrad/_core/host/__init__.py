"""What the host gives to a process, and its limits: private and secret files, open files, memory."""
