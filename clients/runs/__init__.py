"""One run, read and evaluated: what the command line and Python both stand on."""
