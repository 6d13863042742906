"""What holds on this machine: checks of its GPUs and of all that runs on them, in one command."""
