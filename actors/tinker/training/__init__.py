"""The training of any number of LoRA adapters on one base model in memory."""
