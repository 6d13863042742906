"""Commands about the pool: its services, users and machines."""
