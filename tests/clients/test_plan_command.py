"""`tinkermq plan` prints a table or JSON, needs no pool, and fails for what does not fit."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Cli
from tests.support.pages import ROOT, Block, blocks, commands

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


def test_sequences_longer_than_the_models_positions_are_refused(cli: Cli, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 264, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    told = cli("plan", str(GSM8K), f"model.path={tmp_path}", "--gpus", "2xH100")
    assert told.code != 0
    assert f"model {tmp_path} has positions for 512" in told.err
    assert "rollout.max_response_tokens" in told.err


PAGE = ROOT / "docs" / "gpu.md"
SHOWN = [
    (job, command, output)
    for job, command, output in zip(*(list(blocks(PAGE))[i:] for i in range(3)), strict=False)
    if command.text.startswith("tinkermq plan") and output.language == "text"
]
"""Job files of the page, the command that plans each, and what it is said to print."""


def test_the_page_shows_a_plan_for_one_gpu_for_eight_and_for_two_machines() -> None:
    gpus = [command.text.split()[-1] for _, command, _ in SHOWN]
    assert gpus == ["1xH100", "8xH100", "2x8xH100"]


@pytest.mark.parametrize(("job", "command", "output"), SHOWN, ids=lambda one: str(one))
def test_the_plans_of_the_page_are_what_the_command_prints(
    cli: Cli,
    job: Block,
    command: Block,
    output: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # a model that is there is counted exactly
    (tmp_path / job.title).write_text(job.text)
    [words] = commands(command)
    told = cli(*words[1:])
    assert told.code == 0
    assert told.out == output.text
