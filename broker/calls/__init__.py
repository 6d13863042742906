"""What may be asked of scheduler, auth service and learner for the user of the connection."""
