"""How large may be what users write: every field has a bound, its own or that of its kind."""
