"""The scheduler's jobs: records, states, actors, holdings and secrets."""
