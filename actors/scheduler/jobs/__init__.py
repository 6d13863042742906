"""What the scheduler knows of jobs: records, states, actors, holdings and secrets."""
