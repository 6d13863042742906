"""Rewards of answers: rules, functions, endpoints and judges."""
