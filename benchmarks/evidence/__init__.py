"""Evidence on learning: runs with a forced lag, and what their curves say."""
