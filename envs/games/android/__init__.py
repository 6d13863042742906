"""A phone as Android shows it: its screen as text, and what can be done there."""
