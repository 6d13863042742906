"""Learning which of two answers is the better one: DPO, and reward models."""
