"""The REST interface: its operations, their answers and their description."""
