"""`tinkermq plan` prints a table or JSON, needs no pool, and fails for what does not fit."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Cli

GSM8K = Path(__file__).parents[2] / "examples" / "gsm8k.yaml"
VLLM = ("generator.engine=vllm", "learner.ranks=4", "learner.slots=4", "generator.count=4")


def test_a_plan_names_memory_the_largest_term_settings_and_time(cli: Cli) -> None:
    told = cli("plan", str(GSM8K), "--gpus", "2xH100")
    assert told.code == 0
    assert told.out.startswith("2xH100, a model of 1.54 B weights\n")
    for part in ("learner, 1 card(s): ", "fits", "optimiser states", "largest: ", "a step: "):
        assert part in told.out
    assert "efficiencies that are assumed" in told.out


def test_it_prints_json_too(cli: Cli) -> None:
    told = cli("plan", str(GSM8K), *VLLM, "--gpus", "2x4xNVIDIA H100 80GB HBM3", "--json")
    assert told.code == 0
    values = json.loads(told.out)
    assert (values["gpus"], values["fits"]) == ("2x4xH100", True)
    assert {actor["actor"]: actor["cards"] for actor in values["actors"]} == {
        "learner": 4,
        "generator": 4,
    }


def test_a_job_that_does_not_fit_fails_with_figures_and_the_key(cli: Cli) -> None:
    told = cli("plan", str(GSM8K), "model.path=Qwen/Qwen2.5-7B-Instruct", "--gpus", "2xH100")
    assert told.code != 0
    assert "does not fit" in told.out
    assert "H100 has 76.5 GiB for it: optimiser states take 56.7 GiB" in told.err
    assert "set lora.rank, learner.optimizer=muon, or raise learner.ranks" in told.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--gpus", "8xVoodoo2"), "no GPU is known by the name 'Voodoo2'"),
        (("model.path=nobody/knows-it", "--gpus", "H100"), "the shape of model.path=nobody/knows"),
        (("--gpus", "H100", "--measured", "nowhere.json"), "nowhere.json cannot be read"),
        (("placement=separate", "--gpus", "H100"), "these cannot share a card"),
    ],
)
def test_what_cannot_be_planned_is_told(cli: Cli, words: tuple[str, ...], error: str) -> None:
    told = cli("plan", str(GSM8K), *words)
    assert told.code != 0
    assert error in told.err
