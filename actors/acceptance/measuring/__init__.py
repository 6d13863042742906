"""How fast a learner's step is, beside what it could be."""
