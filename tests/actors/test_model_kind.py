"""What a model is, and what computes it, is told from its configuration alone."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.engine.transformers.decoder import load_decoder
from tinkermq.actors.model_kind import kind_checks
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.actors.training.policies import load_models
from tinkermq.schemas.checks import CheckResult, run_checks
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.settings import refuse_models
from tinkermq.schemas.wire.errors import ModelError, TinkermqError
from transformers import PreTrainedConfig
from transformers.models.lfm2_moe import Lfm2MoeConfig
from transformers.models.minimax import MiniMaxConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.phi3 import Phi3Config

from tests.support.families import make_config
from tests.support.refused_models import REFUSED, save_refused


def checked(folder: Path) -> dict[str, CheckResult]:
    job = JobConfig.model_validate({"model": {"path": str(folder)}, "env": {"game": "bandit"}})
    return {result.name: result for result in run_checks(kind_checks(job, alone=True))}


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_work_is_refused_with_the_reason_and_the_remedy(
    name: str, tmp_path: Path
) -> None:
    said = save_refused(name, tmp_path)
    failed = [result for result in checked(tmp_path).values() if not result.ok]
    assert any(said in result.detail for result in failed), failed
    assert all(result.hint and result.code == "model" for result in failed[:1])


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    for file in tmp_path.iterdir():
        if file.name != "config.json":
            file.unlink()
    results = checked(tmp_path)
    assert {name for name, result in results.items() if result.outcome != "ok"} == {
        "vLLM engine",
        "tokenizer",
    }
    assert results["learner"].detail.startswith("packed rows")
    assert "q_proj" in results["LoRA"].detail


@pytest.mark.parametrize(
    ("config", "rank", "refused"),
    [
        (MiniMaxConfig(num_hidden_layers=2), 2, "has no class for it"),
        (Lfm2MoeConfig(num_hidden_layers=2), 0, "have other log-probs there"),
        (Lfm2MoeConfig(num_hidden_layers=2), 2, ""),
        (MixtralConfig(num_hidden_layers=2), 0, ""),
    ],
)
def test_a_model_is_refused_for_vllm_where_vllm_would_not_compute_its_versions(
    config: PreTrainedConfig, rank: int, refused: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    tree = {"model": {"path": str(tmp_path)}, "env": {"game": "bandit"}, "lora": {"rank": rank}}
    for engine in ("vllm", "transformers"):
        job = JobConfig.model_validate({**tree, "generator": {"engine": engine}})
        checks = [each for each in kind_checks(job, alone=True) if each.name == "vLLM engine"]
        (result,) = run_checks(checks)
        assert refused in result.detail
        is_refused = engine == "vllm" and refused != ""
        assert (result.outcome == "failed") == is_refused
        submitted = pytest.raises(ModelError, match=refused) if is_refused else nullcontext()
        with submitted:
            refuse_models(job)
        if not refused.startswith("has no class"):  # served, its weights stay
            refuse_models(job, trains=False)


@pytest.mark.parametrize(
    ("family", "sections", "said"),
    [
        ("bloom", {}, "takes no mask of the tokens"),
        ("gpt_oss", {"model": {"attn_implementation": "varlen"}}, "its attention has sinks"),
        ("lfm2", {"learner": {"ranks": 2, "slots": 2, "context_parallel": 2}}, "recurrent layers"),
        ("minimax_m2", {"algorithm": {"router_replay": True}}, "router_replay"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_weights_are_read(
    family: str, sections: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """In the words of `model check`; the weights here are those of another model."""
    save_tiny_model(tmp_path)
    make_config(family).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), **sections.get("model", {})}
    job = JobConfig.model_validate({"env": {"game": "bandit"}, **sections, "model": model})
    with pytest.raises(TinkermqError, match=said):
        load_models(job, None)


@pytest.mark.parametrize("family", ["bloom", "deepseek_v32", "recurrent_gemma"])
def test_what_the_engine_cannot_compute_is_refused_before_weights_are_read(
    family: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    make_config(family).save_pretrained(tmp_path)
    (result,) = [each for each in checked(tmp_path).values() if each.name == "transformers engine"]
    with pytest.raises(ModelError) as refused:
        load_decoder(str(tmp_path), dtype=torch.float32, device="cpu", max_slots=2, max_tokens=64)
    assert (refused.value.message, refused.value.hint) == (result.detail, result.hint)


@pytest.mark.full
def test_a_window_that_no_layer_is_named_to_have_may_be_longer_than_the_context(
    tmp_path: Path,
) -> None:
    Phi3Config(num_hidden_layers=2, sliding_window=1 << 18).save_pretrained(tmp_path)
    results = checked(tmp_path)
    assert [name for name, result in results.items() if not result.ok] == []
