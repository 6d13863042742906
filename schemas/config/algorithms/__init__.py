"""What a job learns by: advantage, loss, correction, reference, teacher, critic."""
