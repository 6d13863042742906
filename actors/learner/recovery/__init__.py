"""How a learner that starts again comes to where the run was."""
