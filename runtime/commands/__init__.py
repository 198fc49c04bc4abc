"""What the runtime's commands do. The command line itself is in `runtime/cli.py`, which imports nothing heavy."""
