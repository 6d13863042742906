"""Sums over the tokens of a step, over all its micro-batches and ranks."""

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from .parallel import Parallel

OF_THE_UPDATES = ("pg_loss", "kl_loss", "teacher_loss")
"""What only an update has."""


@dataclass
class StepSums:
    """What adds up over the micro-batches and updates of a step."""

    totals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Metric name to the sum over the tokens."""
    tokens: int = 0
    """Generated tokens that were seen."""
    norms: list[float] = field(default_factory=list[float])
    """Gradient norm of each update; not finite: the update was left out."""
    old: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Places of all generated tokens, and their log-probs before the update."""

    def include(self, totals: dict[str, Tensor]) -> None:
        """Add sums of further tokens."""
        for name, value in totals.items():
            before = self.totals.get(name)
            self.totals[name] = value if before is None else before + value

    def add(self, values: dict[str, Tensor], index_N: Tensor, old_N: Tensor) -> None:
        """Add the sums of a micro-batch whose N tokens stand at `index_N` of the batch."""
        self.include(values)
        self.tokens += len(index_N)
        self.old.append((index_N, old_N))

    def of_all(self, parallel: Parallel) -> "StepSums":
        """Put together what all ranks have; norms are those of all shares already."""
        if parallel.size == 1:
            return self
        totals = {name: value.cpu() for name, value in self.totals.items()}
        old = [(index_N.cpu(), old_N.cpu()) for index_N, old_N in self.old]
        together = StepSums(norms=self.norms)
        for other in parallel.gather(replace(self, totals=totals, old=old)):
            together.include(other.totals)
            together.tokens += other.tokens
            together.old += other.old
        return together

    def numbers(self) -> dict[str, float]:
        """Name the sums as metrics; what no micro-batch measured is left out.

        Losses are of the updates, all else is a mean over all generated tokens of the batch.
        """
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        found = {"actor/skipped_updates": float(len(self.norms) - len(finite))}
        if finite:
            found["actor/grad_norm"] = sum(finite) / len(finite)
        for name, total in self.totals.items():
            per_update = name in OF_THE_UPDATES
            found[f"actor/{name}"] = float(total) / (len(self.norms) if per_update else self.tokens)
        return found
