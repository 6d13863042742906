"""Commands about agent programs."""
