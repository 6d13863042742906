"""The engine on transformers: continuous batching over a slot cache."""
