"""Algorithm configuration: advantage, loss, correction, reference, teacher, critic."""
