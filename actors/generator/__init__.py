"""The generator: pulls tasks, plays their episodes, appends the groups to the rollout log.

`engine` is the interface of generation, `transformers_engine` and `vllm_engine` are behind it;
`players` starts the one that is configured. `chat` turns messages to tokens, `agent_loop` plays one
episode, `generator` drives many of them.
"""
