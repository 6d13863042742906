"""The HTTP endpoint for agent programs: OpenAI's and Anthropic's APIs over the broker."""
