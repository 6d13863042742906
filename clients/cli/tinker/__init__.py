"""Commands of the Tinker service."""
