"""The games that come with tinkermq: one for each cell of data × turns, and larger ones."""
