"""What travels of the Tinker API's operations, and the values that they are about."""
