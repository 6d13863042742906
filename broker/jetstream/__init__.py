"""JetStream: streams, buckets, objects, and ordered readers."""
