"""Every setting of PEFT's LoraConfig is honoured wherever adapters are read, or refused by name.

The judge is PEFT: what `PeftModel.from_pretrained` computes with a folder is what training,
serving, samplers and trainers of the Tinker API compute with it.
"""

import copy
import dataclasses
import functools
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import EvaConfig, PeftModel, get_peft_model
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.lora import config as kinds
from safetensors.torch import load_file, save_file
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.engine.vllm.weight_files import WeightFiles
from tinkermq.actors.policy import lora
from tinkermq.actors.policy.lora import config_of, policy_tensors, read_lora
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy, load_tokenizer
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.actors.training.model import load_model
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ModelError
from transformers import AutoModelForCausalLM

from tests.support.models import make_tiny_model
from tests.support.tinker import TIED, open_trainer, supervised

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings(TIED),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]


torch.set_num_threads(1)
IDS = torch.arange(14)[None] + 40
_CLOSE = 2e-5
MLP = ["down_proj", "gate_proj", "up_proj"]
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]

HONOURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "r": {"r": 3},
    "lora_alpha": {"lora_alpha": 20},
    "lora_dropout": {"lora_dropout": 0.3},
    "rank_pattern of one layer": {"rank_pattern": {"model.layers.0.self_attn.q_proj": 2}},
    "rank_pattern of a name": {"rank_pattern": {"q_proj": 7, "o_proj": 1}},
    "rank_pattern as an expression": {"rank_pattern": {r"layers\.1\..*": 6}},
    "alpha_pattern of a name": {"alpha_pattern": {"v_proj": 64}},
    "alpha_pattern of one layer": {"alpha_pattern": {"layers.1.self_attn.q_proj": 1}},
    "alpha_pattern as an expression": {"alpha_pattern": {r"layers\.0\..*_proj": 0.5}},
    "both patterns": {
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"q_proj": 4, "layers.0.self_attn.v_proj": 40},
    },
    "patterns whose order counts": {"alpha_pattern": {"0.self_attn.q_proj": 3, "q_proj": 48}},
    "use_rslora": {"use_rslora": True},
    "use_rslora and patterns": {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_to_transform as a number": {"layers_to_transform": 0},
    "layers_pattern": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "layers_pattern as a list": {"layers_to_transform": [0], "layers_pattern": ["layers", "h"]},
    "target_modules as an expression": {"target_modules": r".*\.1\.self_attn\.(q|k)_proj"},
    "target_modules of all layers": {"target_modules": "all-linear"},
    "target_modules by whole names": {"target_modules": ["model.layers.1.mlp.up_proj", "o_proj"]},
    "exclude_modules": {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    "exclude_modules as an expression": {"exclude_modules": r".*0.*q_proj"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "init_lora_weights gaussian": {"init_lora_weights": "gaussian"},
    "init_lora_weights orthogonal": {"init_lora_weights": "orthogonal"},
    "init_lora_weights False": {"init_lora_weights": False},
    "eva_config": {"init_lora_weights": "eva", "eva_config": EvaConfig()},
    "output layer": {"target_modules": [*ATTENTION, "lm_head"]},
    "labels": {"revision": "main", "inference_mode": True, "task_type": "CAUSAL_LM"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "bias": {"bias": "all"},
    "bias ": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "modules_to_save ": {"modules_to_save": ["norm"]},
    "trainable_token_indices": {"trainable_token_indices": [41, 42]},
    "ensure_weight_tying": {"ensure_weight_tying": True},
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "target_parameters": {"target_parameters": ["self_attn.q_proj.weight"], "target_modules": []},
    "alora_invocation_tokens": {"alora_invocation_tokens": [45, 46]},
    "use_qalora": {"use_qalora": True, "qalora_group_size": 16},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "init_lora_weights ": {"init_lora_weights": "olora"},
    "init_lora_weights  ": {"init_lora_weights": "mica"},
    "kasa_config": {"kasa_config": kinds.KasaConfig()},
    "velora_config": {"velora_config": kinds.VeloraConfig()},
    "monteclora_config": {"monteclora_config": kinds.MontecloraConfig()},
    "lora_ga_config": {"lora_ga_config": kinds.LoraGAConfig()},
}
WRITTEN: dict[str, Any] = {
    "loftq_config": {"loftq_bits": 4},
    "init_lora_weights": "loftq",
    "corda_config": {"corda_method": "kpm"},
    "layer_replication": [[0, 2], [1, 2]],
    "megatron_config": {"hidden_size": 64},
    "arrow_config": {"top_k": 3},
    "use_bdlora": {"nblocks": 2},
    "peft_type": "LOHA",
    "invented_later": {"some": 1},
    "invented_switch": True,
    "use_everything": 0.5,
}
"""Settings that stand in a file; what this PEFT cannot make here, or does not know yet."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("settings") / "base")


@pytest.fixture(scope="module")
def trainer(base: Path) -> AdapterTrainer:
    """A trainer of the Tinker API, which refuses an adapter before it takes anything of it."""
    return open_trainer(base)


@functools.cache
def _loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def plain(base: Path) -> Any:
    """Return the base model; PEFT changes what it is given."""
    return copy.deepcopy(_loaded(base))


def make(base: Path, folder: Path, settings: Mapping[str, Any]) -> Path:
    """Have PEFT make and write an adapter that changes what the model says."""
    given: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ATTENTION,
        "task_type": "CAUSAL_LM",
        **settings,
    }
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # what PEFT says of odd settings is not what is tested
        torch.manual_seed(0)
        model = get_peft_model(plain(base), PeftLoraConfig(**given))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.requires_grad or ".lora_" in name:
                    weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
        model.eval().save_pretrained(str(folder))
    return folder


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids).logits[0].float()


def of_peft(base: Path, folder: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(plain(base), str(folder)).eval())


def job(model: Path, config: LoraConfig) -> JobConfig:
    given = {"model": {"path": str(model)}, "env": {"game": "none"}}
    return JobConfig.model_validate(given).model_copy(update={"lora": config})


def change(folder: Path, **settings: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


async def of_engine(base: Path, folder: Path) -> torch.Tensor:
    """Return the log-probs of the prompt's tokens as an engine with many adapters tells them."""
    engine = await TransformersEngine.start(str(base), max_slots=2, max_context=32)
    try:
        await engine.add_adapter("a", folder)
        scores = await engine.score(IDS[0].tolist(), request_id="s", adapter="a")
    finally:
        await engine.close()
    return torch.tensor(scores.logprobs[1:])


@pytest.fixture(scope="module", params=HONOURED)
def name(request: pytest.FixtureRequest) -> str:
    """Which settings are honoured."""
    return request.param


@pytest.fixture(scope="module")
def adapter(name: str, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(base, tmp_path_factory.mktemp("honoured") / "theirs", HONOURED[name])


async def test_every_path_computes_with_an_adapter_what_peft_does(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    expected = of_peft(base, adapter)
    assert (expected - logits(plain(base))).abs().max() > 0.05, "it changes something"
    told = expected.log_softmax(-1)[:-1].gather(1, IDS[0, 1:, None])[:, 0]

    def close(found: torch.Tensor, wanted: torch.Tensor = expected) -> None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=_CLOSE)

    config = config_of(adapter)
    # served by itself, or trained on from it
    close(logits(load_policy(str(adapter), config, dtype=torch.float32)))
    asked = job(adapter, config)
    learner = load_model(asked.model, asked.learner, None, lora=asked.lora, seed=0)
    close(logits(learner.eval()))
    # what is written of it then is what PEFT opens, and what a resumed run goes on with
    checkpoint = tmp_path / "checkpoint"
    learner.save_pretrained(checkpoint)
    close(of_peft(base, checkpoint))
    onward = job(base, config)
    resumed = load_model(onward.model, onward.learner, checkpoint, lora=onward.lora, seed=3)
    close(logits(resumed.eval()))
    # beside others in one engine, as samplers have them
    close(await of_engine(base, adapter), told)
    # merged, as whoever takes a model takes it
    close(logits(load_causal_lm(str(adapter), dtype=torch.float32)))
    # as vLLM reads new weights
    sent = WeightFiles()
    tensors = {name: tensor.detach() for name, tensor in policy_tensors(learner).items()}
    place = sent.write_adapter(1, tensors, config)
    if not any("lm_head" in name for name in tensors):
        change(place, target_modules=sorted({lora.layer_of(name) for name in tensors}))
        close(of_peft(base, place))
    sent.close()


def test_a_trainer_of_the_tinker_api_goes_on_with_an_adapter_as_peft_does(
    base: Path, adapter: Path, tmp_path: Path, trainer: AdapterTrainer, name: str
) -> None:
    data = [supervised(np.random.default_rng(0), 12)]
    attention, every = of_blocks("self_attn", ATTENTION), of_blocks("mlp", MLP)
    every = sorted([*attention, *every])
    if policy_layers(adapter) not in (attention, [*attention, "lm_head"], every):
        with pytest.raises(ModelError, match=f"made with .*{name.split()[0]}="):
            trainer.load(name, adapter, with_optimizer=False)
        return
    trainer.load(name, adapter, with_optimizer=False)
    told = trainer.forward_backward(name, data, "cross_entropy", backward=False).logprobs[0]
    ids = torch.from_numpy(data[0].tokens.astype(np.int64))[None]
    targets = torch.from_numpy(data[0].inputs["target_tokens"])[:, None]
    trainer.save(name, tmp_path / "saved", with_optimizer=True)
    for folder in (adapter, tmp_path / "saved"):
        with torch.no_grad():
            model = PeftModel.from_pretrained(plain(base), str(folder)).eval()
            expected = logits(model, ids).log_softmax(-1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(told, expected, atol=_CLOSE)


def policy_layers(folder: Path) -> list[str]:
    found = {lora.layer_of(name) for name in read_lora(folder)[1]}
    return sorted(found, key=lambda name: (name == "lm_head", name))


def of_blocks(part: str, names: list[str]) -> list[str]:
    return [f"model.layers.{number}.{part}.{name}" for number in (0, 1) for name in names]


def refusing(base: Path, folder: Path, trainer: AdapterTrainer) -> Iterator[tuple[str, Any]]:
    """Yield what reads an adapter's folder, by name."""
    yield "served", lambda: config_of(folder)
    yield "sampled", lambda: read_lora(folder)
    fresh = LoraConfig(rank=4, alpha=8, targets=ATTENTION)
    begun, onward = job(folder, fresh), job(base, fresh)
    yield "begun", lambda: load_model(begun.model, begun.learner, None, lora=fresh, seed=0)
    yield "resumed", lambda: load_model(onward.model, onward.learner, folder, lora=fresh, seed=0)
    yield "tinker", lambda: trainer.load("refused", folder, with_optimizer=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_is_refused_by_name_in_every_path(
    base: Path, tmp_path: Path, trainer: AdapterTrainer, name: str
) -> None:
    folder = make(base, tmp_path / "theirs", REFUSED[name])
    for path, read in refusing(base, folder, trainer):
        with pytest.raises(ModelError) as raised:
            read()
        assert name.strip() in raised.value.message, path
        assert "merge" in raised.value.hint
    if name in ("lora_bias", "alora_invocation_tokens"):  # PEFT itself cannot merge them
        with pytest.raises(ModelError, match=name):
            load_causal_lm(str(folder), dtype=torch.float32)
        return
    merged = load_causal_lm(str(folder), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), of_peft(base, folder), rtol=0, atol=_CLOSE)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_file_says_and_nobody_here_knows_is_refused_by_name(
    base: Path, tmp_path: Path, trainer: AdapterTrainer, name: str
) -> None:
    folder = change(make(base, tmp_path / "theirs", {}), **{name: WRITTEN[name]})
    for path, read in refusing(base, folder, trainer):
        with pytest.raises(ModelError) as raised:
            read()
        assert name in raised.value.message, path
    if name.startswith(("invented", "use_every")):  # PEFT itself would leave it out
        with pytest.raises(ModelError, match=name):
            load_causal_lm(str(folder), dtype=torch.float32)
    for off in (None, False, [], {}):
        if name not in ("peft_type", "init_lora_weights"):
            config_of(change(folder, **{name: off}))


def test_every_field_of_peft_is_known_and_tried() -> None:
    known = lora._HONOURED | lora._WITHOUT_EFFECT | lora._REFUSED.keys()
    fields = {field.name for field in dataclasses.fields(PeftLoraConfig)}
    assert fields <= known
    tried = {field for case in (*HONOURED.values(), *REFUSED.values()) for field in case}
    assert lora._HONOURED | lora._REFUSED.keys() <= tried | WRITTEN.keys() | {"target_modules"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern"),
        ({"alpha_pattern": {"layers.0.self_attn.v_proj": 2}}, "alpha_pattern"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"exclude_modules": r".*1.*q_proj"}, "exclude_modules"),
        ({"target_modules": r".*\.0\..*q_proj"}, "target_modules"),
        ({"lora_alpha": 9}, "alpha 9"),
    ],
)
def test_a_job_that_is_configured_otherwise_does_not_train_on(
    base: Path, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    folder = make(base, tmp_path / "theirs", settings)
    fresh = LoraConfig(rank=4, alpha=8, targets=ATTENTION)
    for config, checkpoint in ((job(folder, fresh), None), (job(base, fresh), folder)):
        with pytest.raises(ModelError, match=named) as raised:
            load_model(config.model, config.learner, checkpoint, lora=config.lora, seed=0)
        assert "set lora." in raised.value.hint


def test_patterns_that_are_written_otherwise_and_mean_the_same_are_taken(
    base: Path, tmp_path: Path
) -> None:
    folder = make(base, tmp_path / "theirs", {"alpha_pattern": {"q_proj": 64}})
    alphas = {f"layers.{n}.self_attn.q_proj": 64.0 for n in (0, 1)}
    same = LoraConfig(rank=4, alpha=8, targets=ATTENTION[::-1], alpha_pattern=alphas)
    config = job(folder, same)
    model = load_model(config.model, config.learner, None, lora=same, seed=0)
    torch.testing.assert_close(logits(model.eval()), of_peft(base, folder), rtol=0, atol=_CLOSE)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"r": 0}, "it has no r"),
        ({"r": "four"}, "rank"),
        ({"lora_alpha": -1}, "alpha"),
        ({"target_modules": None}, "targets"),
        ({"rank_pattern": {"q_proj": -2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "high"}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_(proj": 3}}, "unterminated"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 4 in .*q_proj.* says 3"),
    ],
)
def test_a_file_that_makes_no_sense_is_told(
    base: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    folder = change(make(base, tmp_path / "theirs", {}), **settings)
    with pytest.raises(ModelError, match=why):
        read_lora(folder)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_adapter_that_brings_embeddings_of_its_own_is_refused(
    base: Path, tmp_path: Path, trainer: AdapterTrainer, name: str
) -> None:
    folder = make(base, tmp_path / "theirs", {"target_modules": [*ATTENTION, "lm_head"]})
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    place = "lm_head" if name == "lm_head" else "model.embed_tokens"
    tensors[f"base_model.model.{place}.base_layer.weight"] = torch.ones(264, 64)
    save_file(tensors, file, {"format": "pt"})
    config = job(folder, config_of(folder))
    with pytest.raises(ModelError, match=f"contains {place}"):
        load_model(config.model, config.learner, None, lora=config.lora, seed=0)
    with pytest.raises(ModelError, match=f"contains {place}"):
        trainer.load("refused", folder, with_optimizer=False)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_merged_adapter_of_tied_layers_changes_one_of_them(
    base: Path, tmp_path: Path, name: str
) -> None:
    folder = make(base, tmp_path / "theirs", {"target_modules": rf".*({name}|q_proj)"})
    merged = load_causal_lm(str(folder), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), of_peft(base, folder), rtol=0, atol=_CLOSE)
    merged.save_pretrained(tmp_path / "merged")
    load_tokenizer(str(base)).save_pretrained(tmp_path / "merged")
    again = load_causal_lm(str(tmp_path / "merged"), dtype=torch.float32)
    torch.testing.assert_close(logits(again), logits(merged), rtol=0, atol=_CLOSE)
    shutil.rmtree(tmp_path / "merged")
