"""Where an actor computes: on the GPU that its node gives it, else on the CPU."""

from typing import Any, cast

import torch

from ...schemas.plan.cards import Card, card_like


def first_device(num_gpus: int) -> torch.device:
    """Return where a process computes that sees so many GPUs: on the first."""
    return torch.device("cuda", 0) if num_gpus else torch.device("cpu")


def own_device() -> torch.device:
    """Return where this process computes: a node shows each actor its own GPUs, or none."""
    return first_device(torch.cuda.device_count())


def own_card() -> Card | None:
    """Return the first GPU that this process sees; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    found: Any = cast(Any, torch.cuda).get_device_properties(0)
    return card_like(str(found.name), int(found.total_memory))
