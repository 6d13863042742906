"""The gateway: the pool over HTTP, as a dashboard in the browser and as a REST interface.

It has no rights of its own: `sessions` holds one connection to the broker per logged-in user, made
with that user's key, so that NATS decides over HTTP, too. `scheduler` and `operations` ask for
changes; `data/` reads; `pages/`, `rest/`, `users` and `openai/` answer, with `queries` for what
they are asked alike; `limits/` bounds what visitors may send; `app` puts them together, `server` is
the process around it.
"""
