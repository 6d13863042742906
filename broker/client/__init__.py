"""The connection to NATS: login, publishing, requests and replies."""
