"""The base model that all adapters share, as it is computed."""

from dataclasses import dataclass

from ...learner.training.model import Scorer
from .layers import AdapterInUse


@dataclass(frozen=True)
class SharedBase:
    """The model that all adapters share, and how it is computed."""

    scorer: Scorer
    in_use: AdapterInUse
    microbatch_tokens: int
    """Columns of one forward and backward pass; a longer datum is one of its own."""
    logits_columns: int
    """Columns whose logits are held at once."""
    share_prompts: bool
    """Whether what data begin with in common is computed once."""
