"""Creates jobs: checks and names them, and creates their streams and folders."""
