"""The optimiser step: model, objective, ranks, schedules, checkpoints."""
