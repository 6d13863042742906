"""On-policy distillation: teachers that score what the policy drew itself."""
