"""Episodes: the policy and the game take turns, alone, in groups and at tables."""
