"""How weights are updated: the rules of optimisers, and the scale of a loss in float16."""
