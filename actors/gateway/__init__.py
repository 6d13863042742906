"""The gateway: the pool over HTTP, as a dashboard in the browser and as a REST interface.

It has no rights of its own: `sessions` has one connection to the broker per logged-in user, made
with that user's key, so NATS checks permissions of HTTP requests, too. `operations` changes jobs;
`data/` reads; `pages/`, `rest`, `openai`, `tinker/`, `programs` and `user_episodes` answer
requests; `limits` bounds and `guard` checks them; `server` builds the application and runs it.
"""
