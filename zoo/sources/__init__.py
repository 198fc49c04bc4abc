"""Where weights come from: the hub and Python packages. Folders and GGUF files need no fetching."""
