"""The generator: plays tasks, appends their groups to the rollout log, and follows the weights."""
