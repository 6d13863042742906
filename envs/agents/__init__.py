"""Agent programs: episodes whose model calls come from a program, over any of the model APIs."""
