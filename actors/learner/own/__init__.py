"""Functions of the user's own in the place of those of the library."""
