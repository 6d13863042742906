"""The connection to NATS: logging in, publishing, asking and answering."""
