"""The coefficient of the entropy bonus: fixed, or moved so that entropy stays at a target.

With a target the coefficient rises by a fixed amount after each step whose entropy was below it,
and falls by as much after the others, never below 0, and counts only while entropy is below
(Skywork-OR1, arXiv 2505.22312). The entropy is that of the step before, so no pass is spent on it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ....schemas.config.algorithms.algorithm import AlgorithmConfig

_FILE = "learner/entropy.json"
MAX_COEF = 1.0
"""The coefficient rises no further."""


@dataclass
class EntropyBonus:
    """The coefficient as it is now."""

    coef: float
    """Rises and falls with a target, else stays."""
    entropy: float | None = None
    """Mean entropy of a token in the step before, in nats; None: there was none yet."""

    def of_step(self, algorithm: AlgorithmConfig) -> float:
        """Return the coefficient with which a step is trained."""
        target = algorithm.entropy_target
        if target is None or self.entropy is None:
            return self.coef
        return self.coef if self.entropy <= target else 0.0

    def measured(self, algorithm: AlgorithmConfig, entropy: float) -> None:
        """Take the entropy that a step has measured."""
        target = algorithm.entropy_target
        if target is None:
            return
        self.entropy = entropy
        change = algorithm.entropy_coef_step if entropy < target else -algorithm.entropy_coef_step
        self.coef = min(max(self.coef + change, 0.0), MAX_COEF)

    def save(self, folder: Path) -> None:
        """Write it beside the optimiser of a checkpoint."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    def load(self, folder: Path) -> None:
        """Take it from a checkpoint that has one; else it stays as configured."""
        if (folder / _FILE).is_file():
            saved = json.loads((folder / _FILE).read_text())
            self.coef, self.entropy = saved["coef"], saved["entropy"]
