"""Commands about games and their data."""
