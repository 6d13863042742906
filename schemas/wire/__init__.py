"""How anything travels: the base of messages, their encoding, errors, ids, subjects and traces."""
