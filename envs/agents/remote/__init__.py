"""Programs that run elsewhere than the host of their episode, and reach it through a gateway."""
