"""The gateway: the pool over HTTP, as a dashboard in the browser and as a REST interface.

It has no rights of its own: `sessions` holds one connection to the broker per logged-in user, made
with that user's key, so that NATS decides over HTTP, too. `scheduler` asks for changes; `records`,
`curves`, `history`, `rollouts`, `episodes`, `logs` and `checkpoints` read; `pages`, `users` and
`api` answer, `openai` in OpenAI's protocol; `rest` lists the operations of `api`; `live` streams
what is new; `app` puts them together, `server` is the process around it.
"""
