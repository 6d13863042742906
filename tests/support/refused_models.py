"""Models that cannot be trained or cannot generate here, and what is said of each."""

import json
from pathlib import Path
from typing import Any

from tinkermq.actors.policy.tiny_models import save_tiny_model

from tests.support.families import make_config

CODE = {"AutoConfig": "configuration_mine.MineConfig"}
OWN_CACHE = "has a class with a cache of its own"
INDEX = "has layers that keep more than keys, values and recurrent states (DynamicIndexedLayer)"
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "an encoder-decoder": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "is an encoder-decoder (T5ForConditionalGeneration)",
    ),
    "no text decoder": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        "has no text decoder (ViTForImageClassification)",
    ),
    "no class that generates": (
        {"model_type": "vit", "architectures": None},
        "has no text decoder for model_type 'vit'",
    ),
    "an unknown family": ({"model_type": "llama9"}, "has no model_type 'llama9'"),
    "an unknown kind of layer": (
        {"layer_types": ["full_attention", "magic"]},
        "has layers of kind magic, which transformers",
    ),
    "code of its own": (
        {"model_type": "mine", "auto_map": CODE},
        "is computed by code in its own folder",
    ),
    "quantised weights": ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
    "a tokenizer larger than the embedding": (
        {"vocab_size": 200},
        "the tokenizer does not match model",
    ),
    "a window longer than the context": (
        {**WINDOWS, "sliding_window": 1 << 30},
        f"see {1 << 30} tokens, and it has positions for",
    ),
    "a window without a width": ({**WINDOWS, "sliding_window": None}, "cannot be made"),
}
"""By what is wrong: changes of a sound model's config.json, and words of the refusal."""
FAMILIES = {
    "bloom": "cannot be trained: its class takes no mask",
    "deepseek_v32": INDEX,
    "glm_moe_dsa": INDEX,
    "minimax": OWN_CACHE,
    "recurrent_gemma": OWN_CACHE,
}
"""Families that the learner or the transformers engine refuses."""
REFUSED = {**{name: said for name, (_, said) in CHANGES.items()}, **FAMILIES}


def save_refused(name: str, folder: Path) -> str:
    """Write a model's folder, and return what is said of it."""
    save_tiny_model(folder)
    file = folder / "config.json"
    if name in FAMILIES:
        file.write_text(json.dumps(make_config(name).to_dict(), default=str))
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **CHANGES[name][0]}))
    return REFUSED[name]
