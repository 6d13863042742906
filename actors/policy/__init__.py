"""Models that are trained and served: folders, chat templates, LoRA, vision, experts."""
