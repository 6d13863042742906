"""Rollouts: episodes of games and of agent programs, in exact tokens, as groups for the rollout log."""
