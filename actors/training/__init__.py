"""One optimiser step: advantages, losses, corrections, packing, optimiser, ranks."""
