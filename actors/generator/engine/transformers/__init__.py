"""The engine on transformers: continuous batching on the model's own forward pass."""
