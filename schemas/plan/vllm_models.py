"""Which families of models vLLM does not compute, for checks where vLLM is not installed.

`tests/actors/engine/test_vllm_families.py` compares the tables with vLLM.
"""

from collections.abc import Mapping
from typing import Any

from ..wire.errors import ModelError

_RECURRENT = (
    "vLLM 0.32 has no class for it, and what it runs through transformers has no recurrent layers"
)
REFUSED: Mapping[str, str] = {
    "bamba": _RECURRENT,
    "minimax": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
}
"""Why vLLM cannot compute a family, by its `model_type`."""
NOT_ON_CPUS: Mapping[str, str] = {
    "deepseek_v32": "sparse attention",
    "glm_moe_dsa": "sparse attention",
    "kimi_linear": "its linear attention",
    "olmo_hybrid": "its linear attention",
}
"""What vLLM's CPU build lacks for a family that vLLM computes on GPUs."""


def refuse_in_vllm(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model of a family that vLLM does not compute."""
    kind = str(config.get("model_type", "?"))
    if reason := REFUSED.get(kind):
        raise ModelError(
            f"vLLM cannot compute model {path} of type {kind!r}: {reason}",
            hint="set generator.engine=transformers, if it takes the model (docs/models.md)",
        )
