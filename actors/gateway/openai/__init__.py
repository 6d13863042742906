"""OpenAI's endpoints for models that are served."""
