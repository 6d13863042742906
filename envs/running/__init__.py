"""Runs games in this process, in threads, or in processes of their own."""
