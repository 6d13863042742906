"""`tinkermq config show|schema` and `plan`: the configuration of a run, and its memory and time."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import print_json, print_plain

if TYPE_CHECKING:
    from ...schemas.config.job import JobConfig
    from ...schemas.plan.plan import Efficiencies, Plan

_WIDTH = 100


def show(config: Path, /, *overrides: str, json: bool = False) -> int:
    """Print the effective configuration: defaults, then the file, then the overrides.

    Parameters
    ----------
    config
        YAML file; the repository's examples/ has one for each game.
    overrides
        `section.key=value`, such as `learner.lr=1e-5`.
    json
        Print JSON instead of YAML.
    """
    from ...schemas.config.load_config import load_config

    effective = load_config(config, overrides).model_dump(mode="json")
    if json:
        print_json(effective)
    else:
        from ...schemas.config.load_config import write_yaml

        print_plain(write_yaml(effective).rstrip())
    return 0


def schema(key: str | None = None, /, *, json: bool = False) -> int:
    """Print every configuration key with its type, default and meaning.

    Parameters
    ----------
    key
        Only this section or key, such as `learner`.
    json
        Print the JSON Schema, for editors.
    """
    from ...schemas.config.job import JobConfig

    if json:
        print_json(JobConfig.model_json_schema())
        return 0
    rows = [
        row
        for row in _rows(JobConfig, "")
        if key is None or row[0] == key or row[0].startswith(f"{key}.")
    ]
    if not rows:
        from ...schemas.wire.errors import NotFoundError, did_you_mean

        known = [row[0] for row in _rows(JobConfig, "")]
        raise NotFoundError(
            f"there is no configuration key {key!r}", hint=did_you_mean(str(key), known)
        )
    for name, kind, default, text in rows:
        default_note = default if default == "required" else f"default {default}"
        lines = textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        print_plain("\n".join([f"{name}: {kind}; {default_note}", *lines]))
    return 0


def _rows(model: type[Any], prefix: str) -> list[tuple[str, str, str, str]]:
    from pydantic import BaseModel

    from ...schemas.config.sections import only_while
    from ...schemas.wire.field_docs import field_docs
    from ...schemas.wire.field_text import default_text, type_text

    texts = field_docs(model)
    rows: list[tuple[str, str, str, str]] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            rows += _rows(inner, f"{prefix}{name}.")
            continue
        text = " ".join(texts[name].split()) + only_while(field)
        kind, default, text = (
            cell.replace("`", "") for cell in (type_text(field), default_text(field), text)
        )
        rows.append((f"{prefix}{name}", kind, default, text))
    return rows


# -- will a job fit on GPUs, and how long does a step take? ----------------------------------------


def plan(
    config: Path,
    /,
    *overrides: str,
    gpus: str,
    measured: Path | None = None,
    json: bool = False,
) -> int:
    """Estimate what a run takes on GPUs: memory of each card, and the time of a step.

    Names the largest part of a card's memory and the key that shrinks it, and fails for a run that
    does not fit. Nothing is submitted, and no GPU is needed.

    Parameters
    ----------
    config
        YAML file; the repository's examples/ has one for each game.
    overrides
        `section.key=value`, such as `learner.ranks=4`.
    gpus
        Cards: `H100`, `8xH100`, or `2x8xH100` for two machines of eight. Names are those of
        nvidia-smi, Slurm or Kubernetes, MIG slices too (`A100 80GB MIG 3g.40gb`).
    measured
        JSON report of `make test-gpu`, whose efficiencies replace the assumed ones.
    json
        Print JSON.
    """
    from ...schemas.config.load_config import load_config
    from ...schemas.plan.plan import Efficiencies, read_efficiencies

    job = load_config(config, overrides)
    reached = Efficiencies() if measured is None else read_efficiencies(measured)
    made = _plan_of(job, gpus, reached)
    if json:
        print_json(made.to_map())
    else:
        print_plain("\n".join(made.lines()))
    if made.refusal is not None:
        raise made.refusal
    return 0


def _plan_of(job: "JobConfig", gpus: str, reached: "Efficiencies") -> "Plan":
    """Return the plan of a run; ConfigError or ModelError for a run that cannot be planned."""
    from ...schemas.plan.cards import parse_cards
    from ...schemas.plan.plan import make_plan
    from ...schemas.plan.settings import find_models, refuse_models
    from ...schemas.wire.errors import ConfigError, ModelError

    cards = parse_cards(gpus)
    if job.tinker.base:
        raise ConfigError(
            "a service of the Tinker API has no training step to plan",
            hint="plan a run that trains: `tinkermq plan train.yaml --gpus 8xH100`",
        )
    models = find_models(job)
    if models is None:
        raise ModelError(
            f"the shape of model.path={job.model.path}, or of another model of the run, is not "
            "known here: no such folder has a config.json, and tinkermq does not know a published "
            "model of this name",
            hint="give a folder, or fetch the model to the hub's cache (`hf download NAME "
            "config.json`)",
        )
    refuse_models(job)
    return make_plan(job, models, cards, reached)
