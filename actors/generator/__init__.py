"""The generator: pulls tasks, plays their episodes, appends the groups to the rollout log.

`engine/` generates, with transformers or vLLM behind one interface, and knows nothing of episodes;
`episodes/` turns messages to tokens and plays them against the game; `generator` drives many.
"""
