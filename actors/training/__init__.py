"""One optimiser step: advantages, losses, corrections, packing, model, optimiser, ranks, checkpoint."""
