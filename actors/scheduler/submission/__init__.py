"""How a job comes into being: checked, named, given its streams and its folder."""
