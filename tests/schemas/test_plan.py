"""A plan says what fits on which GPUs, chooses settings that do, and names what does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.cards import CardSet, find_card, known_cards, parse_cards
from tinkermq.schemas.plan.model_shape import find_max_positions, find_shape, shape_of
from tinkermq.schemas.plan.plan import (
    Efficiencies,
    ModelUse,
    Plan,
    make_plan,
    plan_for_pool,
    read_efficiencies,
)
from tinkermq.schemas.plan.settings import (
    GpuUse,
    choose_engine_settings,
    find_models,
    refuse_models,
    with_engine_settings,
    with_memory_share,
)
from tinkermq.schemas.wire.errors import ConfigError, ModelError, PlacementError

SHAPES = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
}
"""Of Qwen2.5: width, layers, heads, key-value heads, MLP, vocabulary, tied."""
WEIGHTS = {"0.5B": 0.494e9, "1.5B": 1.544e9, "7B": 7.616e9, "32B": 32.76e9}
IN_16_BITS = {"dtype": "bfloat16", "publish_dtype": "bfloat16"}
VLLM = {"engine": "vllm", "dtype": "bfloat16"}
NEVER_SLEEPS = {**VLLM, "sleep": "never"}
GIB = 1 << 30


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Folders with the config.json of Qwen2.5's models, and nothing else."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "tie_word_embeddings",
    )
    for size, numbers in SHAPES.items():
        config = {"model_type": "qwen2", **dict(zip(names, numbers, strict=True))}
        (tmp_path / size).mkdir()
        (tmp_path / size / "config.json").write_text(json.dumps(config))
    return tmp_path


def job_of(path: Path | str, **sections: Any) -> JobConfig:
    """Return a job of GSM8K's lengths."""
    lengths = {"max_prompt_tokens": 512, "max_turn_tokens": 1536, "max_response_tokens": 1536}
    tree = {"learner": IN_16_BITS, "generator": VLLM} | sections
    return JobConfig.model_validate(
        {"model": {"path": str(path)}, "env": {"game": "none"}, "rollout": lengths, **tree}
    )


def plan_of(job: JobConfig, gpus: str, reached: Efficiencies | None = None) -> Plan:
    found = find_models(job)
    assert found is not None
    return make_plan(job, found, parse_cards(gpus), reached)


def _learner(ranks: int) -> dict[str, Any]:
    return {**IN_16_BITS, "ranks": ranks, "slots": ranks}


def _generator(count: int, wide: int = 1) -> dict[str, Any]:
    return {**VLLM, "count": count, "slots": wide, "tensor_parallel": wide}


FITTING = [
    ("0.5B", "2xH100", {}),
    ("0.5B", "8xH100", {"learner": _learner(4), "generator": _generator(4)}),
    ("1.5B", "2xH100", {}),
    ("1.5B", "4xH100", {"learner": _learner(2), "generator": _generator(2)}),
    ("7B", "2xH100", {"lora": {"rank": 16}}),
    ("7B", "4xH100", {"learner": _learner(3), "generator": _generator(1)}),
    ("7B", "8xH100", {"learner": _learner(4), "generator": _generator(4)}),
    (
        "32B",
        "8xH100",
        {"lora": {"rank": 16}, "learner": _learner(4), "generator": _generator(2, 2)},
    ),
    ("32B", "2x8xH100", {"learner": {**_learner(12)}, "generator": _generator(2, 2)}),
]


@pytest.mark.parametrize(("size", "gpus", "sections"), FITTING, ids=str)
def test_a_job_without_a_key_for_memory_fits(
    models: Path, size: str, gpus: str, sections: dict[str, Any]
) -> None:
    plan = plan_of(job_of(models / size, **sections), gpus)
    assert plan.refusal is None
    assert all(actor.fits for actor in plan.actors)
    assert plan.learner.microbatch_tokens >= 4096
    assert plan.engine.max_requests >= 16
    assert plan.models.policy.weights == pytest.approx(WEIGHTS[size], rel=0.005)


@pytest.mark.parametrize(
    ("size", "gpus", "sections", "term", "key"),
    [
        ("7B", "2xH100", {}, "optimiser states take 56.", "lora.rank"),
        ("32B", "2xA100 40GB", {"lora": {"rank": 16}}, "weights take 61.", "learner.ranks"),
        (
            "32B",
            "8xH100",
            {"learner": _learner(4), "generator": _generator(2, 2)},
            "optimiser states take 61.0 GiB",
            "learner.ranks",
        ),
        (
            "0.5B",
            "2xH100",
            {
                "learner": {
                    **IN_16_BITS,
                    "microbatch_tokens": 65536,
                    "gradient_checkpointing": False,
                }
            },
            "activations take",
            "learner.gradient_checkpointing=true, or lower learner.microbatch_tokens",
        ),
        (
            "32B",
            "16xA100 40GB",
            {"lora": {"rank": 16}, "learner": _learner(8)},
            "generator would hold",
            "generator.tensor_parallel",
        ),
    ],
    ids=str,
)
def test_what_cannot_fit_is_refused_with_the_largest_term_and_its_key(
    models: Path, size: str, gpus: str, sections: dict[str, Any], term: str, key: str
) -> None:
    refusal = plan_of(job_of(models / size, **sections), gpus).refusal
    assert refusal is not None
    assert term in refusal.message
    assert "GiB for it" in refusal.message
    assert key in refusal.hint


def test_a_card_that_is_too_small_is_named_with_figures(models: Path) -> None:
    refusal = plan_of(job_of(models / "1.5B"), "2xL4").refusal
    assert refusal is not None
    assert refusal.message == (
        "a card of the learner would hold 28.6 GiB (micro-batches of 4096 tokens, with gradient "
        "checkpointing, activations offloaded), and L4 has 21.6 GiB for it: optimiser states "
        "take 11.5 GiB"
    )


def test_activations_are_recomputed_only_where_few_tokens_would_fit(models: Path) -> None:
    small, large = (plan_of(job_of(models / size), "2xH100").learner for size in ("0.5B", "1.5B"))
    assert (small.microbatch_tokens, small.gradient_checkpointing) == (32768, False)
    assert not large.gradient_checkpointing
    assert plan_of(job_of(models / "1.5B"), "2xA100 40GB").learner.gradient_checkpointing


def _long_rows(path: Path, **learner: Any) -> JobConfig:
    lengths = {"max_prompt_tokens": 512, "max_turn_tokens": 65024, "max_response_tokens": 65024}
    rows = {**IN_16_BITS, "max_row_tokens": 65536, **learner}
    return job_of(path, rollout=lengths, lora={"rank": 8}, learner=rows)


def test_activations_leave_the_card_only_where_no_pass_fits_otherwise(models: Path) -> None:
    job = _long_rows(models / "7B")
    assert plan_of(job, "2xH100").learner == (65536, True, False)
    plan = plan_of(job, "2xA100 40GB")
    assert plan.learner == (65536, True, True)
    assert plan.actors[0].fits
    inputs = 65536 * 28 * 3584 * 2
    assert plan.to_map()["actors"][0]["host_terms"]["activations"] == inputs
    kept = plan_of(_long_rows(models / "7B", offload_activations=False), "2xA100 40GB")
    assert kept.refusal is not None
    terms = (dict(_terms(one))["activations"] for one in (kept, plan))
    assert next(terms) - next(terms) == pytest.approx(inputs, rel=0.1)
    assert "learner.offload_activations=true" in "\n".join(plan.lines())


def _terms(plan: Plan) -> list[tuple[str, int]]:
    return [(term.name, term.num_bytes) for term in plan.actors[0].terms]


def test_a_plan_tells_the_machine_s_memory_that_a_checkpoint_takes(models: Path) -> None:
    weights = find_shape(str(models / "7B")).weights  # pyright: ignore[reportOptionalMemberAccess]
    learner = {**IN_16_BITS, "slots": 4, "ranks": 4}
    plan = plan_of(job_of(models / "7B", learner=learner), "8xH100")
    assert plan.to_map()["actors"][0]["host_terms"] == {
        "copy for a checkpoint": 12 * weights // 4,
        "weights for a checkpoint, on the first rank": 4 * weights,
        "versions of new weights, on the first rank": 3 << 34,  # of 15.2 GB, pinned
    }
    assert "of the machine's memory, for each rank: 21.3 GiB copy for a checkpoint, " in "\n".join(
        plan.lines()
    )


def test_what_a_job_sets_is_not_chosen(models: Path) -> None:
    learner = {**IN_16_BITS, "microbatch_tokens": 5000, "gradient_checkpointing": True}
    job = job_of(models / "0.5B", learner=learner, generator={**VLLM, "max_requests": 7})
    plan = plan_of(job, "2xH100")
    assert plan.learner == (5000, True, False)
    assert plan.engine.max_requests == 7


def test_an_engine_serves_as_many_requests_as_its_cache_holds(models: Path) -> None:
    long = {"max_prompt_tokens": 512, "max_turn_tokens": 7000, "max_response_tokens": 31000}
    job = job_of(models / "7B", rollout=long, learner={**_learner(4), "max_row_tokens": 32000})
    found = find_models(job)
    assert found is not None
    few = choose_engine_settings(job, found, find_card("A100 40GB")).max_requests
    more = choose_engine_settings(job, found, find_card("H100")).max_requests
    assert 1 < few < more < 256


def test_an_engine_computes_with_what_the_plan_says(models: Path) -> None:
    """Also on a card that it shares, of which the learner gives it a part."""
    for gpus, sections in (("2xH100", {}), ("2xL4", {"lora": {"rank": 8}}), ("H100", {})):
        job = job_of(models / "1.5B", **sections)
        plan = plan_of(job, gpus)
        if plan.use is not None:
            job = with_memory_share(job, plan.use.memory_share)
        settled = with_engine_settings(job, plan.cards.card).generator
        engine = plan.engine
        assert settled.max_requests == engine.max_requests
        assert settled.max_batched_tokens == engine.batched_tokens
        assert settled.memory_share == engine.memory_share
        text = "\n".join(plan.lines())
        for key in ("max_requests", "max_batched_tokens", "memory_share"):
            assert f"generator.{key}={getattr(settled, key):g}" in text


def test_keys_of_an_engine_that_the_user_sets_win(models: Path) -> None:
    keys = {"max_requests": 7, "max_batched_tokens": 3000, "memory_share": 0.5}
    card = find_card("H100")
    for key, value in keys.items():
        job = job_of(models / "1.5B", generator={**VLLM, key: value})
        settled = with_engine_settings(job, card).generator
        assert getattr(settled, key) == value
        assert (settled.max_batched_tokens or 0) >= (settled.max_requests or 0)  # or vLLM refuses
        others = [getattr(settled, other) for other in keys if other != key]
        assert None not in others
    few = job_of(models / "1.5B", generator={**VLLM, "max_batched_tokens": 64})
    assert with_engine_settings(few, card).generator.max_requests == 64
    proposes = {"speculation": {"num_tokens": 7}}
    few = job_of(models / "1.5B", generator={**VLLM, **proposes, "max_batched_tokens": 64})
    assert with_engine_settings(few, card).generator.max_requests == 8
    unknown = job_of("nobody/knows-it")
    assert with_engine_settings(unknown, card) == unknown


def test_a_draft_model_counts_and_has_the_policys_vocabulary(models: Path) -> None:
    def needed(speculation: dict[str, Any]) -> dict[str, int]:
        job = job_of(models / "1.5B", generator={**VLLM, "speculation": speculation})
        refuse_models(job)
        [_, generator, *_] = plan_of(job, "2xH100").actors
        return {term.name: term.num_bytes for term in generator.terms}

    draft = {"num_tokens": 3, "draft": str(models / "0.5B")}
    plain, drafted = needed({}), needed(draft)
    assert drafted["weights"] - plain["weights"] == pytest.approx(2 * WEIGHTS["0.5B"], rel=0.01)
    assert drafted["logits"] == 4 * plain["logits"]
    with pytest.raises(ModelError, match="has 152064 tokens"):
        needed({**draft, "draft": str(models / "7B")})


def test_a_server_and_programs_are_not_bound_by_the_number_of_episodes(models: Path) -> None:
    card, few = find_card("H100"), {"generator": {**VLLM, "max_episodes": 16}}
    job = job_of(models / "0.5B", **few)
    assert with_engine_settings(job, card).generator.max_requests == 16
    assert with_engine_settings(job, card, serves=True).generator.max_requests == 1024
    of_programs = job_of(models / "0.5B", **few).model_dump(exclude_unset=True) | {
        "env": {},
        "agent": {"command": ["run"]},
    }
    programs = JobConfig.model_validate(of_programs)
    assert with_engine_settings(programs, card).generator.max_requests == 1024


def test_the_transformers_engine_takes_a_card_of_its_own_whole(models: Path) -> None:
    job = job_of(models / "0.5B", generator={"dtype": "bfloat16"})
    settled = with_engine_settings(job, find_card("H100")).generator
    assert (settled.max_requests, settled.memory_share) == (256, None)
    assert settled.max_batched_tokens is None


def test_critic_reference_and_policies_count(models: Path) -> None:
    def held(**sections: Any) -> dict[str, int]:
        [learner, *_] = plan_of(job_of(models / "1.5B", **sections), "2xB200").actors
        return {term.name: term.num_bytes for term in learner.terms}

    plain, weights = held(), 4 * int(find_shape(str(models / "1.5B")).weights)  # pyright: ignore
    with_reference = held(algorithm={"kl_coef": 0.1})
    with_critic = held(algorithm={"advantage": "gae"})
    assert 2 * with_reference["reference and teachers"] == weights  # kept in 16 bits
    assert with_critic["critic and other policies"] == weights
    assert with_critic["optimiser states"] == 2 * plain["optimiser states"]
    adapter = held(algorithm={"kl_coef": 0.1}, lora={"rank": 8})
    assert "reference and teachers" not in adapter


def test_ranks_replicas_sequences_and_offload_divide_what_a_card_holds(models: Path) -> None:
    def held(**learner: Any) -> dict[str, int]:
        sections = {**IN_16_BITS, "microbatch_tokens": 8192, **learner}
        sections |= {"gradient_checkpointing": True}
        plan = plan_of(job_of(models / "7B", learner=sections), "9xH100")
        return {term.name: term.num_bytes for term in plan.actors[0].terms}

    four, eight = held(ranks=4, slots=4), held(ranks=8, slots=8)
    assert four["weights"] == 2 * eight["weights"]
    assert held(ranks=8, slots=8, replicas=2)["weights"] == four["weights"]
    apart = held(ranks=8, slots=8, context_parallel=2)
    assert apart["activations"] < 0.6 * eight["activations"]
    assert "weights" not in held(cpu_offload=True)


def test_experts_take_memory_and_only_chosen_ones_time() -> None:
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    assert shape is not None
    assert shape.weights == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_weights == pytest.approx(3.0e9, rel=0.1)


def test_a_vision_tower_counts() -> None:
    text = {"model_type": "qwen2", "tie_word_embeddings": True}
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text |= dict(zip(names, (2048, 36, 16, 2), strict=True))
    text |= {"intermediate_size": 11008, "vocab_size": 151936}
    vision = {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "spatial_merge_size": 2}
    shape = shape_of({"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision})
    assert shape.vision_weights == pytest.approx(0.67e9, rel=0.1)
    assert shape.weights > shape_of(text).weights + 0.6e9


# -- cards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),  # nvidia-smi
        ("nvidia_h100_80gb_hbm3", "H100"),  # Slurm's gres
        ("NVIDIA-H100-80GB-HBM3", "H100"),  # nvidia.com/gpu.product
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("a100", "A100 80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100 80GB MIG 3g.40gb"),
        ("nvidia_a100_1g.5gb", "A100 40GB MIG 1g.5gb"),
        ("nvidia.com/mig-1g.10gb", "A100 80GB MIG 1g.10gb"),
        ("mig-3g.71gb", "H200 MIG 3g.71gb"),
    ],
)
def test_cards_are_found_by_the_names_that_tools_give_them(name: str, card: str) -> None:
    assert find_card(name).name == card


def test_every_card_of_the_table_is_found_by_its_own_name() -> None:
    assert [find_card(name).name for name in known_cards()] == known_cards()


def test_a_slice_has_its_share_of_a_card() -> None:
    whole, part = find_card("A100 80GB"), find_card("A100 80GB MIG 3g.40gb")
    assert part.memory_bytes == 40 * GIB
    assert part.bfloat16_flops == pytest.approx(whole.bfloat16_flops * 3 / 7)
    assert part.bandwidth == pytest.approx(whole.bandwidth / 2)
    assert find_card("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9_500 << 20).memory_bytes == 9_500 << 20


def test_the_memory_that_a_driver_reports_is_taken() -> None:
    assert find_card("NVIDIA A100", 40 * GIB).name == "A100 40GB"
    assert find_card("NVIDIA H100", 93 * GIB).memory_bytes == 93 * GIB


def test_an_unknown_card_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no GPU is known by the name 'Voodoo2'") as caught:
        parse_cards("8xVoodoo2")
    assert "H100" in caught.value.hint
    assert "MIG" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "machines", "per_machine"),
    [("H100", 1, 1), ("8xH100", 1, 8), ("2x8xH100", 2, 8), ("4 x NVIDIA A100-SXM4-40GB", 1, 4)],
)
def test_numbers_of_cards_and_machines_are_read(text: str, machines: int, per_machine: int) -> None:
    cards = parse_cards(text)
    assert (cards.machines, cards.per_machine, cards.num) == (
        machines,
        per_machine,
        machines * per_machine,
    )


@pytest.mark.parametrize("text", ["", "0xH100", "100000xH100"])
def test_a_number_of_cards_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_cards(text)


# -- what is wrong with a job on some cards --------------------------------------------------------


def test_two_actors_on_one_card_without_shares_are_refused(models: Path) -> None:
    refusal = plan_of(job_of(models / "0.5B", placement="separate"), "H100").refusal
    assert refusal is not None
    assert refusal.message == (
        "the run needs 2 cards, 1 for the learner and 1 for generators, and 1xH100 has 1: these "
        "cannot share a card"
    )
    assert "placement=colocated" in refusal.hint


def test_an_sft_job_shares_a_single_card_with_the_engine_that_validates_it(models: Path) -> None:
    rows = {"sft": {"data": ["chats.jsonl"]}}
    for placement in ("auto", "colocated"):
        plan = plan_of(job_of(models / "1.5B", **rows, placement=placement), "H100")
        assert plan.refusal is None
        assert plan.shares_card
        assert plan.use == GpuUse(plan.engine.memory_share, sleeps=False)
    in_turns = plan_of(job_of(models / "1.5B"), "A100 40GB")
    assert in_turns.use is not None
    assert in_turns.use.sleeps  # and so the learner of conversations, which never waits, cannot
    refusal = plan_of(job_of(models / "1.5B", **rows), "A100 40GB").refusal
    assert refusal is not None
    assert "env.num_val=0" in refusal.hint
    unplayed = job_of(models / "1.5B", **rows, env={"game": "none", "num_val": 0})
    assert plan_of(unplayed, "A100 40GB").refusal is None


def test_learner_and_generator_share_a_single_card(models: Path) -> None:
    plan = plan_of(job_of(models / "1.5B"), "H100")
    assert plan.refusal is None
    assert plan.shares_card
    assert plan.use == GpuUse(plan.engine.memory_share, sleeps=False)
    learner, generator = plan.actors
    card = plan.cards.card.memory_bytes
    assert learner.num_bytes + generator.usable_bytes <= 0.95 * card
    assert generator.fits
    passing = [term.num_bytes for term in learner.terms if term.name in ("activations", "logits")]
    assert sum(passing) <= card / 4  # both may compute at once
    times = plan.times
    assert times.step_s == times.generation_s + times.training_s + times.weights_s
    assert "both share the card: the engine generates while the learner trains" in plan.lines()
    refusal = plan_of(job_of(models / "1.5B"), "RTX 4090").refusal
    assert refusal is not None
    assert "optimiser" in refusal.message


def test_they_take_turns_where_both_do_not_fit_at_once(models: Path) -> None:
    plan = plan_of(job_of(models / "1.5B"), "A100 40GB")
    assert plan.refusal is None
    assert plan.use is not None
    assert plan.use.sleeps
    assert "both share the card: the engine sleeps while the learner trains" in plan.lines()
    assert plan.to_map()["engine_sleeps"]
    never = plan_of(job_of(models / "1.5B", generator=NEVER_SLEEPS), "A100 40GB")
    assert never.refusal is not None
    assert "learner and generator do not fit on one GPU of 40 GiB" in never.refusal.message


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_fp8_is_refused_by_its_key_where_a_card_has_no_kernels_for_it(
    models: Path, key: str
) -> None:
    job = job_of(models / "0.5B", generator={**VLLM, key: "fp8"})
    refusal = plan_of(job, "2xA100 80GB").refusal
    assert refusal is not None
    assert refusal.message == f"generator.{key}=fp8, for which A100 80GB has no kernels"
    assert plan_of(job, "2xL40S").refusal is None


def test_weights_in_fp8_are_refused_where_a_card_has_no_kernels_for_them(models: Path) -> None:
    file = models / "0.5B" / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(config))
    job = job_of(models / "0.5B")
    refusal = plan_of(job, "2xA100 80GB").refusal
    assert refusal is not None
    assert "has FP8 weights, for which A100 80GB has no kernels" in refusal.message
    assert "H100" in refusal.hint
    assert plan_of(job, "2xH100").refusal is None


def test_bfloat16_is_refused_where_a_card_does_not_compute_with_it(models: Path) -> None:
    refusal = plan_of(job_of(models / "0.5B"), "2xT4").refusal
    assert refusal is not None
    assert "learner.dtype=bfloat16, which T4 does not compute with" in refusal.message


def test_a_pool_refuses_what_none_of_its_gpus_holds(models: Path) -> None:
    job = job_of(models / "7B")
    small, large = ("NVIDIA L4", 23034 << 20), ("NVIDIA B200", 183359 << 20)
    refused = plan_for_pool(job, [small, small])
    assert refused is not None
    assert isinstance(refused.refusal, PlacementError)
    taken = plan_for_pool(job, [small, large])
    assert taken is not None
    assert taken.refusal is None
    assert taken.cards.card.name == "B200"
    assert plan_for_pool(job, [("Voodoo2", 1 << 30)]) is None
    assert plan_for_pool(job, []) is None
    assert plan_for_pool(job_of("nobody/knows-it"), [small]) is None


# -- positions -------------------------------------------------------------------------------------

_ORIGINAL_8192 = {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, 512),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (  # the config says the scaled length itself
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 2}}, 2048),
        # these change beyond a length, for all sequences of a pass
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 512),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 65536,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "longrope", **_ORIGINAL_8192},
                },
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "yarn", "factor": 4, **_ORIGINAL_8192},
                },
            },
            32768,
        ),
        ({"max_position_embeddings": None}, 0),
        ({"max_position_embeddings": "many", "rope_scaling": 3}, 0),
        ({}, 0),
    ],
)
def test_the_longest_sequence_of_a_model_is_read_from_its_configuration(
    tmp_path: Path, config: dict[str, Any], positions: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_max_positions(str(tmp_path)) == positions
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    named = {"base_model_name_or_path": str(tmp_path)}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    assert find_max_positions(str(adapter)) == positions


def model_of(folder: Path, positions: int) -> str:
    """Return a folder with a config.json of so many positions, and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    return str(folder)


@pytest.mark.parametrize(
    "sections",
    [
        {"generator": {"max_context": 2049}},
        {"rollout": {"max_prompt_tokens": 1025, "max_response_tokens": 1024}},
        {"policies": {"seller": "short"}},
        {"algorithm": {"advantage": "gae"}, "critic": {"path": "short"}},
        {"algorithm": {"kl_coef": 0.1, "reference": {"path": "short"}}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_sequences_longer_than_a_model_of_the_job_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    model_of(tmp_path / "short", 1024)
    model = model_of(tmp_path / "long", 2048)
    lengths = {"max_prompt_tokens": 1024, "max_response_tokens": 1024, "max_turn_tokens": 64}
    refuse_models(job_of(model, rollout=lengths, generator={"max_context": 2048}))
    changed = {name: {**value} for name, value in sections.items()}
    changed["rollout"] = {**lengths, **sections.get("rollout", {})}
    with pytest.raises(
        ModelError, match=r"of up to 20\d\d tokens .* positions for (1024|2048)"
    ) as it:
        refuse_models(job_of(model, **changed))
    assert "rollout.max_prompt_tokens" in it.value.hint


def test_lengths_of_unknown_models_and_of_rows_are_not_judged(tmp_path: Path) -> None:
    refuse_models(job_of("Qwen/Qwen2.5-7B", generator={"max_context": 1_000_000}))
    model = model_of(tmp_path / "short", 64)
    refuse_models(
        job_of(model, tinker={"base": "org/base"}, env={"game": "", "hosts": 0, "num_val": 0})
    )
    rows = {"sft": {"data": ["chats.jsonl"]}, "env": {"game": "", "hosts": 0, "num_val": 0}}
    refuse_models(job_of(model, **rows))


def test_a_plan_tells_what_a_request_holds_of_windows_latents_and_states(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 300,
    }
    hybrid = {
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    latent = {"num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    kinds = ["sliding_attention", "full_attention"]
    window = {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 128}
    told = {}
    for name, layers in {"hybrid": hybrid, "latent": latent, "window": window}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": name, **sizes, **layers})
        )
        plan = plan_of(job_of(tmp_path / name, generator={"engine": "transformers"}), "2xH100")
        told[name] = plan.to_map()["request"] | {"line": plan.lines()}
    # One layer of keys and values; three states of 4 x 8 x 8, and convolutions over 2 x 16 + 32.
    assert told["hybrid"]["token_bytes"] == 2 * 2 * 16 * 2
    assert told["hybrid"]["state_bytes"] == 3 * (4 * 4 * 8 * 8 + 2 * 4 * (2 * 16 + 32))
    held = told["hybrid"]["state_bytes"] + told["hybrid"]["token_bytes"] * 1024
    assert told["hybrid"]["snapshots"] == GIB // held
    assert told["latent"]["token_bytes"] == 2 * (32 + 8) * 2
    assert told["window"]["token_bytes"] == 2 * 2 * 64 * 2
    assert any("window of 128" in line for line in told["window"]["line"])
    assert any("recurrent states" in line for line in told["hybrid"]["line"])


# -- times -----------------------------------------------------------------------------------------


def test_times_are_those_of_an_audit_by_hand(models: Path) -> None:
    """Qwen2.5-7B on 4 + 4 H100: generators 12 s, learner 20 to 24 s, by hand."""
    lengths = {"max_prompt_tokens": 512, "max_turn_tokens": 1500, "max_response_tokens": 1500}
    job = job_of(
        models / "7B",
        rollout=lengths,
        learner={**_learner(4), "gradient_checkpointing": False, "microbatch_tokens": 8192},
        generator=_generator(4),
        training={"batch_size": 64},
    )
    times = plan_of(job, "8xH100").times
    assert times.generation_s == pytest.approx(12, rel=0.25)
    assert 20 < times.training_s < 24
    assert times.step_s == max(times.generation_s, times.training_s + times.weights_s)
    fast = job.model_copy(update={"weights": job.weights.model_copy(update={"transport": "nccl"})})
    assert 1 < plan_of(fast, "8xH100").times.weights_s < 2  # to pinned memory, and to the others


@pytest.mark.parametrize("share", [True, False])
def test_a_plan_has_the_mfu_that_a_run_of_its_times_shows(models: Path, share: bool) -> None:
    lengths = {"max_prompt_tokens": 512, "max_turn_tokens": 1500, "max_response_tokens": 1500}
    learner = {**_learner(4), "share_prompts": share, "gradient_checkpointing": True}
    job = job_of(models / "7B", rollout={**lengths, "group_size": 4}, learner=learner)
    plan = plan_of(job, "8xH100")
    use = ModelUse.of(job, plan.models, plan.cards.card)
    assert use is not None
    groups = [[(512, 1500)] * 4] * job.training.batch_size
    assert plan.times.mfu == pytest.approx(use.mfu(groups, plan.times.training_s))
    assert plan.times.mfu == pytest.approx(0.3)  # 3 of 4 passes at 40 %
    assert f"MFU {plan.times.mfu:.0%}" in plan.lines()[-1]
    weights, attention = plan.models.policy.active_weights, 28 * 28 * 128 * 2012
    tokens = 512 * (1 if share else 4) + 4 * 1500
    by_hand = 3 * (2 * weights + 2 * attention) * tokens / (4 * 989e12)
    assert use.mfu([[(512, 1500)] * 4], 1.0) == pytest.approx(by_hand)
    unknown = find_card("H100")
    assert ModelUse.of(job, plan.models, replace(unknown, bfloat16_flops=0.0)) is None
    assert ModelUse.of(job, None, unknown) is None


def test_measured_efficiencies_replace_the_assumed_ones(models: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"efficiencies": {"learner_of_peak": 0.2}, "tests": []}))
    job = job_of(models / "0.5B")
    assumed, reached = plan_of(job, "2xH100"), read_efficiencies(report)
    measured = plan_of(job, "2xH100", reached)
    assert measured.times.training_s == pytest.approx(2 * assumed.times.training_s)
    assert f"measured, {report}" in "\n".join(measured.lines())
    assert "efficiencies that are assumed" in "\n".join(assumed.lines())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"efficiencies": {"learner_of_peak": -1}}'])
def test_a_report_without_efficiencies_is_refused(tmp_path: Path, text: str) -> None:
    report = tmp_path / "report.json"
    report.write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_efficiencies(report)


def test_a_model_is_found_by_folder_cache_adapter_or_name(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    snapshot = cache / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((models / "7B" / "config.json").read_text())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    named = {"base_model_name_or_path": str(models / "1.5B")}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for path, size in (("me/mine", "7B"), (str(adapter), "1.5B"), ("Qwen/Qwen2.5-32B", "32B")):
        shape = find_shape(path)
        assert shape is not None
        assert shape.weights == pytest.approx(WEIGHTS[size], rel=0.005)
    assert find_shape("nobody/knows-it") is None
    assert find_shape("~nobody-here/model") is None
    assert find_shape("\0") is None


def test_a_plan_is_the_same_in_lines_and_as_json(models: Path) -> None:
    plan = plan_of(job_of(models / "7B"), "2xH100")
    values = json.loads(json.dumps(plan.to_map()))
    assert values["gpus"] == "2xH100"
    assert values["fits"] is False
    assert "lora.rank" in values["hint"]
    learner = values["actors"][0]
    assert learner["largest"] == "optimiser states"
    assert sum(learner["terms"].values()) == learner["bytes"]
    text = "\n".join(plan.lines())
    assert "2xH100, a model of 7.62 B weights" in text
    assert "does not fit" in text
    assert f"{learner['terms']['optimiser states'] / GIB:7.2f} GiB  optimiser states" in text


def test_cards_are_named_as_they_were_given() -> None:
    assert str(CardSet(find_card("H100"), 2, 8)) == "2x8xH100"
