"""The plain parts of JetStream: streams, buckets, objects, and reading them in order."""
