"""How weights are updated where it is not by torch's AdamW."""
