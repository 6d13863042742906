"""Checkpoints, models and run folders: on disk, in stores by URL, in caches."""
