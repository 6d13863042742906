"""Generation: the interface of an engine, and what all engines share."""
