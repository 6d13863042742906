"""The trainer of a Tinker service: many users' adapters on one base model."""
