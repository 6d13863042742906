"""Samplers of a Tinker service: any adapter of its users, on one base model in memory."""
