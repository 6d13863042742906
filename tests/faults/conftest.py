"""Fixtures: the whole stack as real processes, and a tiny random model."""

from tests.stack_fixtures import model, module_stack, stack

__all__ = ["model", "module_stack", "stack"]
