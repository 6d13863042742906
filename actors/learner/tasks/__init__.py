"""What becomes of the tasks that a learner has issued."""
