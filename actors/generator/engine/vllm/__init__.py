"""The engine on vLLM."""
