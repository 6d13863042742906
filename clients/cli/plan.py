"""`tinkermq plan`: will a job fit on GPUs, and how long does a step take?"""

from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.config.load_config import load_config
from ...schemas.plan.cards import parse_cards
from ...schemas.plan.plan import Efficiencies, make_plan, read_efficiencies
from ...schemas.plan.settings import find_models, refuse_long_contexts
from ...schemas.wire.errors import ConfigError, ModelError
from .output import print_json, print_plain

if TYPE_CHECKING:
    from ...schemas.config.job import JobConfig
    from ...schemas.plan.plan import Plan


def plan(
    config: Path,
    /,
    *overrides: str,
    gpus: str,
    measured: Path | None = None,
    json: bool = False,
) -> int:
    """Estimate what a job takes on GPUs: memory of each card, and the time of a step.

    Names the largest part of a card's memory and the key that shrinks it, and fails for a job that
    does not fit. Nothing is submitted, and no GPU is needed.

    Parameters
    ----------
    config
        YAML file; examples/ has one for each game.
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
    job = load_config(config, overrides)
    reached = Efficiencies() if measured is None else read_efficiencies(measured)
    made = plan_of(job, gpus, reached)
    if json:
        print_json(made.to_map())
    else:
        print_plain("\n".join(made.lines()))
    if made.refusal is not None:
        raise made.refusal
    return 0


def plan_of(job: "JobConfig", gpus: str, reached: Efficiencies) -> "Plan":
    """Return the plan of a job; ConfigError or ModelError for what cannot be planned."""
    cards = parse_cards(gpus)
    if job.tinker.base:
        raise ConfigError(
            "a service of the Tinker API has no training step to plan",
            hint="plan a job that trains: `tinkermq plan examples/gsm8k.yaml --gpus 8xH100`",
        )
    models = find_models(job)
    if models is None:
        raise ModelError(
            f"the shape of model.path={job.model.path}, or of another model of the job, is not "
            "known here: no such folder has a config.json, and it is no published model that "
            "tinkermq knows",
            hint="give a folder, or fetch the model to the hub's cache (`hf download NAME "
            "config.json`)",
        )
    refuse_long_contexts(job)
    return make_plan(job, models, cards, reached)
