"""The models that are trained and served: folders, tokenizers and chat templates, LoRA, vision, experts."""
