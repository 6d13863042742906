"""Keys of saved models that transformers before version 5 reads, beside those of version 5.

transformers 5 writes `rope_parameters` and `dtype`, and whether embeddings are tied outside of
`text_config`. Version 4 ignores the first and computes with its default base, without a warning,
and draws an output layer of its own for tied models with images. Programs that are not transformers
read the older keys, too. A tokenizer that version 5 writes is not opened by version 4 at all.
Version 5 reads both forms, so a saved folder has both in config.json, and the older one in
tokenizer_config.json.

Version 4 has no key for some positions, such as a scaling of its own in each type of layer. They
are written as transformers 5 does, and logged.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import structlog

_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
"""Kinds of scaling that version 4 knows."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LOCAL_BASES = {"gemma3": "rope_local_base_freq", "olmo3": None}
"""Families whose sliding layers have positions without scaling in version 4, and the key of their
base; None: the base of all layers."""


def add_older_config(folder: Path) -> None:
    """Add the keys of version 4 to the config.json of a folder, if it has one."""
    _rewrite(folder / "config.json", _logged_config)


def add_older_tokenizer(folder: Path) -> None:
    """Write the tokenizer_config.json of a folder as version 4 opens it, if it has one."""
    _rewrite(folder / "tokenizer_config.json", older_tokenizer)


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if file.is_file():
        changed = change(json.loads(file.read_text(encoding="utf-8")))
        text = json.dumps(changed, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")


def _logged_config(config: dict[str, Any]) -> dict[str, Any]:
    older, unknown = older_config(config)
    for positions in unknown:
        _log.warning("positions_without_older_form", positions=positions)
    return older


def older_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config.json with the keys of version 4, also in its parts, and what has no such key.

    The latter are model types, each with its positions in words.
    """
    added: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            part = cast("dict[str, Any]", value)
            if key == "text_config" and "tie_word_embeddings" in config:  # read here by version 4
                part = {"tie_word_embeddings": config["tie_word_embeddings"], **part}
            added[key], more = older_config(part)
            unknown += more
    if "dtype" in config:
        added["torch_dtype"] = config["dtype"]
    if positions := config.get("rope_parameters"):
        kind = str(config.get("model_type", ""))
        older = _older_positions(kind, positions)
        added |= older or {}
        if older is None and positions.get("rope_type") != "axial":  # of images, and always 10,000
            unknown.append(f"{kind}: {positions}")
    return {**config, **added}, unknown


def older_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json that version 4 opens and version 5 reads alike."""
    older = dict(config)
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    if named := older.pop("model_specific_special_tokens", None):
        older["extra_special_tokens"] = named
    return older


def _older_positions(kind: str, positions: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keys of version 4 for a model type's `rope_parameters`; None: it has none."""
    if _FULL not in positions and _SLIDING not in positions:
        return _flat(kind, positions)
    family = next((name for name in _LOCAL_BASES if kind.startswith(name)), None)
    full, sliding = positions.get(_FULL), positions.get(_SLIDING)
    if family is None or not full or not sliding or sliding.get("rope_type") != "default":
        return None
    older = _flat(kind, full)
    if older is None:
        return None
    if (key := _LOCAL_BASES[family]) is not None:
        return older | {key: sliding["rope_theta"]}
    return older if sliding["rope_theta"] == full["rope_theta"] else None


def _flat(kind: str, positions: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the older keys for positions that are alike in all layers."""
    rest = dict(positions)
    type_, base = rest.pop("rope_type", "default"), rest.pop("rope_theta", None)
    share = rest.pop("partial_rotary_factor", None)
    if type_ not in _TYPES or base is None:
        return None
    keys = ("rope_theta", "partial_rotary_factor")
    if kind.startswith("gpt_neox"):
        keys = ("rotary_emb_base", "rotary_pct")
    older: dict[str, Any] = {keys[0]: base}
    if share is not None:
        older[keys[1]] = share
    if kind.startswith(("phi3", "phi4_multimodal")) and type_ == "longrope":
        factors = ("short_factor", "long_factor")  # its own check wants these, `type`, no more
        older["rope_scaling"] = {"type": type_, **{name: rest[name] for name in factors}}
    elif rest or type_ != "default":
        older["rope_scaling"] = {**rest, "rope_type": type_}
    return older
