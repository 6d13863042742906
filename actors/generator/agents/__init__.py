"""Episodes of agent programs: the calls of a model in exact tokens, and what is trained of them."""
