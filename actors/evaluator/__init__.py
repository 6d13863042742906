"""The evaluator: runs the validation set on published versions, beside training."""
