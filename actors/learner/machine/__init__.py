"""What a learner knows of the machine that it runs on."""
