"""Base of messages, encoding, errors, ids, subjects and traces."""
