"""What a configuration names must be there: looked at before a job is submitted."""
