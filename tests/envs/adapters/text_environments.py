"""Two small Gymnasium environments: one that speaks, one that takes arrays."""

import gymnasium
import numpy as np
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


class Take(gymnasium.Env):
    """Takes an action of the space that is named, and says it."""

    observation_space = spaces.Text(200)

    def __init__(self, space):
        self.action_space = SPACES[space]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "act", {}

    def step(self, action):
        return str(self.action_space.to_jsonable([action])), 0.0, False, False, {}


_ARROW = spaces.Box(-1, 1, (2,))
SPACES = {
    "map": spaces.Dict(arrow=_ARROW, key=spaces.Discrete(2)),
    "pair": spaces.Tuple((spaces.Discrete(2), spaces.Dict(arrow=_ARROW))),
    "numbers": spaces.MultiDiscrete([3, 3]),
    "bits": spaces.MultiBinary(2),
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "number": spaces.Discrete(2),
    "arrow": _ARROW,
}
gymnasium.register("Take-v0", entry_point=lambda **settings: Take(**settings))
