"""Bounds of what users write: every field has its own, or its type's."""
