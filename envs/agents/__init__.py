"""Agent programs: what they send to a model, whichever API they speak. Pure."""
