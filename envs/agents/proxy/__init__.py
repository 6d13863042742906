"""The HTTP endpoint that agent programs call: OpenAI's and Anthropic's APIs over the broker."""
