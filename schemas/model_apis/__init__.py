"""The model APIs: OpenAI Chat Completions and Responses, Anthropic Messages. Pure; no HTTP."""
