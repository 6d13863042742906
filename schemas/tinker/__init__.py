"""Messages and values of the Tinker API."""
