"""Play games with a served model."""
