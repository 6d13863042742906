"""How the Tinker API words operations and results: protobuf and JSON bodies."""
