"""What a shell may do to the process: streams, Ctrl-C, and exit codes."""
