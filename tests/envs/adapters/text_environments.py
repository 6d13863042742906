"""Two small Gymnasium environments: one that speaks, one that takes arrays."""

import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env):
    """Says what it is told."""

    action_space = spaces.Text(8)
    observation_space = spaces.Text(40)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say something", {}

    def step(self, action):
        return action, 0.0, False, False, {}


class Sum(gymnasium.Env):
    """Pays the sum of two numbers."""

    action_space = spaces.MultiDiscrete([3, 3])
    observation_space = spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(sum(action)), False, False, {"is_success": bool(sum(action) == 4)}


gymnasium.register("Echo-v0", entry_point=lambda **settings: Echo(**settings))
gymnasium.register("Sum-v0", entry_point=lambda **settings: Sum(**settings))
