"""Hosting a game beside a run, and publishing one's own episodes."""
