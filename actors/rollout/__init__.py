"""Rollouts: episodes of games and of agent programs, as groups for the rollout log."""
