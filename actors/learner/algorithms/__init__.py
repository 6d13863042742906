"""The algorithms: from episodes to the numbers that a loss is made of. Pure."""
