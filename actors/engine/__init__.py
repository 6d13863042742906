"""Generation engines: one interface, with transformers or with vLLM behind it."""
