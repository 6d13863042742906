"""What each user holds of the pool, and whether there is room for more."""
