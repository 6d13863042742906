"""With the generator's experts the learner computes what the generator did (R3)."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Generation, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.experts import (
    RouterRecorder,
    RouterReplay,
    routers_of,
    shape_of,
)
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.rollout.recording import Transcript
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.micro_batch import TokenSequence, columns_of
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.step import Trainer
from tinkermq.actors.training.varlen import flatten
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.wire.errors import DataError, EngineError, ModelError

from tests.actors.learner.test_ranks import (
    assert_same_reports,
    assert_same_weights,
    batch,
    trained,
)
from tests.actors.learner.test_ranks import config_of as ranks_config
from tests.support.groups import make_group, random_group
from tests.support.models import gradients_of, make_tiny_model, random_prompt

LAYERS, CHOSEN, EXPERTS = 2, 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with four experts each, two of which read a token."""
    return make_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def config_of(folder: Path, **learner: Any) -> JobConfig:
    """Return a job that replays what routers chose."""
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "algorithm": {"router_replay": True},
            "learner": {"lr": 1e-3, **learner},
        }
    )


def with_experts(group: Group, rng: np.random.Generator, layers: int = LAYERS) -> Group:
    """Let a group tell experts at random; what has one prompt has them alike, but for the last."""
    told: list[Trajectory] = []
    longest = max(len(item.token_ids) for item in group.trajectories)
    common = draw(rng, longest, layers)
    for place, item in enumerate(group.trajectories):
        length, prompt = len(item.token_ids) - 1, int(item.mask.argmax())
        experts = draw(rng, length, layers)
        if place < len(group.trajectories) - 1:
            experts[:prompt] = common[:prompt]
        told.append(item.model_copy(update={"experts": experts}))
    return group.model_copy(update={"trajectories": told})


def draw(rng: np.random.Generator, num: int, layers: int = LAYERS) -> np.ndarray:
    """Draw the experts of some tokens."""
    return rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (num, layers, 1)), axis=-1)[
        ..., :CHOSEN
    ].copy()


def plain(model: Any, ids: np.ndarray, experts: np.ndarray | None) -> torch.Tensor:
    """Return the log-probs of tokens behind the first, by routers that are written anew here."""

    def forward(router: Any, layer: int, states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(states.reshape(-1, router.hidden_dim), router.weight)
        chosen = torch.as_tensor(cast("np.ndarray", experts)[:, layer].astype(np.int64))
        mask = torch.full_like(logits, float("-inf")).scatter(1, chosen, 0.0)
        return logits, (logits + mask).softmax(-1).gather(1, chosen), chosen

    originals = [one.forward for one in routers_of(model)]
    if experts is not None:
        for layer, router in enumerate(routers_of(model)):
            router.forward = lambda states, r=router, n=layer: forward(r, n, states)
    try:
        logits = model(input_ids=torch.as_tensor(ids[:-1].astype(np.int64))[None]).logits[0]
    finally:
        for router, original in zip(routers_of(model), originals, strict=True):
            router.forward = original
    return logits.log_softmax(-1).gather(1, torch.as_tensor(ids[1:].astype(np.int64))[:, None])[
        :, 0
    ]


def scorer_of(config: JobConfig) -> tuple[Any, Scorer]:
    """Return a model that learns, and what scores by it with replayed experts."""
    model = cast(Any, load_model(config.model, config.learner))
    return model, Scorer(model, temperature=1.0, replay=RouterReplay(model))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_with_experts_have_the_scores_and_gradients_of_each_sequence_alone(
    folder: Path, checkpointing: bool
) -> None:
    rng = np.random.default_rng(0)
    group = with_experts(random_group(rng), rng)
    model, scorer = scorer_of(config_of(folder, gradient_checkpointing=checkpointing))
    other = cast(Any, load_causal_lm(str(folder), dtype=torch.float32))
    sequences = assemble([group]).sequences
    expected = [
        plain(other, item.token_ids, item.experts)[torch.as_tensor(item.mask[1:] == 1)]
        for item in sequences
    ]
    torch.cat(expected).sum().backward()
    found = torch.zeros(sum(len(part) for part in expected))
    for micro in pack(sequences, max_row_tokens=48, microbatch_tokens=96, share_prompts=True):
        scores = scorer.score(micro).logprobs_N
        found[micro.index_N] = scores.detach()
        scores.sum().backward()
    torch.testing.assert_close(found, torch.cat(expected).detach(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(gradients_of(model), gradients_of(other), atol=2e-4, rtol=1e-4)
    assert all(cast("torch.Tensor", one.weight.grad).abs().max() > 0 for one in routers_of(model))


def test_experts_go_with_their_tokens_into_flat_and_divided_rows(folder: Path) -> None:
    rng = np.random.default_rng(1)
    sequences = assemble([with_experts(random_group(rng), rng)]).sequences
    [packed] = pack(sequences, max_row_tokens=40, microbatch_tokens=200)
    flat = flatten(packed)
    divided = columns_of(packed, 1, 3)
    for rows in (flat, divided):
        ids, experts = rows.input_ids_BT, cast("torch.Tensor", rows.experts_BTLK)
        assert experts.shape == (*ids.shape, LAYERS, CHOSEN)
    was = cast("torch.Tensor", packed.experts_BTLK)
    assert torch.equal(cast("torch.Tensor", flat.experts_BTLK)[0], was[packed.segment_ids_BT > 0])
    width = was.shape[1]
    assert torch.equal(cast("torch.Tensor", divided.experts_BTLK)[:, :width], was)


def test_only_what_was_computed_with_the_same_experts_is_shared() -> None:
    rng = np.random.default_rng(2)
    ids, mask = np.arange(10), np.arange(10) >= 6
    experts = draw(rng, 9)
    same = [TokenSequence(ids, mask, experts=experts) for _ in range(2)]
    other = experts.copy()
    other[0] = (other[0] + 1) % EXPERTS
    for sequences, columns in ((same, 9), ([*same, replace(same[0], experts=other)], 18)):
        [packed] = pack(sequences, max_row_tokens=64, microbatch_tokens=64, share_prompts=True)
        assert packed.num_tokens == columns


async def _generated(
    folder: Path, prompts: list[np.ndarray], *, slots: int, turns: int = 1, swap: bool = False
) -> list[tuple[Transcript, list[Generation]]]:
    """Play some conversations of several turns at once, with weights that change in between."""
    engine = await TransformersEngine.start(
        str(folder), max_slots=slots, max_context=256, record_experts=True
    )
    weights = load_causal_lm(str(folder), dtype=torch.float32).state_dict()

    async def play(number: int) -> tuple[Transcript, list[Generation]]:
        transcript, made = Transcript(), list[Generation]()
        transcript.begin(prompts[number].tolist(), [], "")
        for turn in range(turns):
            one = await engine.generate(
                transcript.token_ids,
                Sampling(int(8 + 3 * number), seed=number),
                request_id=f"{number}.{turn}",
                conversation=f"{number}",
            )
            made.append(one)
            transcript.end_turn([], one)
            if swap and number == 0:
                await engine.load_weights(turn + 1, weights, "recompute")
            if turn < turns - 1:
                transcript.add_observation([9, 10, 11], [])
        return transcript, made

    found = await asyncio.gather(*(play(number) for number in range(len(prompts))))
    await engine.close()
    return list(found)


def test_the_experts_of_a_prompt_that_was_computed_before_are_recorded_too(folder: Path) -> None:
    prompt = np.arange(8, 40, dtype=np.int32)
    played = asyncio.run(_generated(folder, [prompt, prompt], slots=1))
    first, second = (np.concatenate(transcript.experts) for transcript, _ in played)
    assert len(second) == len(played[1][0].token_ids) - 1
    assert np.array_equal(first[: len(prompt)], second[: len(prompt)])


def test_a_gap_in_what_the_engine_told_is_an_error() -> None:
    transcript = Transcript()
    transcript.begin([1, 2, 3, 4], [], "")
    one = np.ones(2, np.int32)
    told = draw(np.random.default_rng(0), 2)
    made = Generation(one, -one.astype(np.float32), one, "stop", told)
    with pytest.raises(EngineError, match="no experts for the tokens 0 to 2"):
        transcript.end_turn([], made)


def test_with_the_generators_experts_no_log_prob_hangs_on_a_near_tie(
    folder: Path, tmp_path: Path
) -> None:
    tied = load_causal_lm(str(folder), dtype=torch.float32)
    with torch.no_grad():
        for router in routers_of(tied):
            cast("torch.Tensor", router.weight).mul_(1e-4)
    tied.save_pretrained(tmp_path)
    load_tokenizer(str(folder)).save_pretrained(tmp_path)
    prompt = random_prompt(np.random.default_rng(4))
    [(transcript, [made])] = asyncio.run(_generated(tmp_path, [prompt], slots=1))
    experts = np.concatenate(transcript.experts)
    model, scorer = scorer_of(config_of(tmp_path))
    with torch.no_grad():  # as if the learner computed a little otherwise
        for router in routers_of(model):
            weight = cast("torch.Tensor", router.weight)
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            weight.add_(1e-6 * noise)
    recorder = RouterRecorder(model)

    def differs(told: np.ndarray | None) -> tuple[float, bool]:
        one = TokenSequence(np.array(transcript.token_ids), np.array(transcript.mask), experts=told)
        [packed] = pack([one], max_row_tokens=256, microbatch_tokens=256)
        with torch.no_grad():
            found = scorer.score(packed).logprobs_N.numpy()
        flipped = not np.array_equal(np.sort(recorder.take_choices()), np.sort(experts))
        return float(np.abs(found - made.logprobs).max()), flipped

    with_them, flipped = differs(experts)
    assert with_them < 1e-4
    assert not flipped
    alone, flipped = differs(None)
    assert flipped
    assert alone > 10 * with_them


def test_a_step_with_replayed_experts_is_the_same_to_the_bit_when_trained_again(
    folder: Path,
) -> None:
    rng = np.random.default_rng(5)
    group = with_experts(random_group(rng), rng)
    states: list[dict[str, torch.Tensor]] = []
    for told in (group, Group.from_bytes(group.to_bytes()), random_group(np.random.default_rng(5))):
        config = config_of(folder)
        trainer = Trainer(load_model(config.model, config.learner), config, total_steps=3)
        trainer.step(assemble([told]), 1)
        states.append(trainer.model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
    assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items())


def _told(group: Group, experts: Any) -> Group:
    items = [item.model_copy(update={"experts": experts}) for item in group.trajectories]
    return make_group(items)


def test_groups_without_fitting_experts_are_refused(folder: Path) -> None:
    rng = np.random.default_rng(6)
    config = config_of(folder)
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=3)
    group = random_group(rng, size=1)
    trainer.check_readable(with_experts(group, rng))
    num = len(group.trajectories[0].token_ids) - 1
    twice = np.zeros((num, LAYERS, CHOSEN), np.uint8)
    for experts, why in (
        (None, "has no experts of its tokens"),
        (draw(rng, num)[:, :1], "2 experts of 1 layers"),
        (draw(rng, num) + np.uint8(EXPERTS), "from 0 to 3"),
        (twice, "each once for a token"),
    ):
        with pytest.raises(DataError, match=why):
            trainer.check_readable(_told(group, experts))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = load_causal_lm(str(make_tiny_model(tmp_path, "qwen3")), dtype=torch.float32)
    with pytest.raises(ModelError, match="no routers") as told:
        shape_of(dense)
    assert "algorithm.router_replay=false" in str(told.value)


def told_batch(step: int) -> list[Group]:
    """Let the batch of a step tell experts at random."""
    rng = np.random.default_rng(step)
    return [with_experts(group, rng) for group in batch(step)]


@pytest.mark.full
@pytest.mark.parametrize("learner", [{}, {"context_parallel": 2}])
def test_two_ranks_replay_as_one_does(folder: Path, learner: dict[str, Any]) -> None:
    algorithm = {"router_replay": True, "kl_coef": 0.05}
    (made, weights), (expected, alone) = (
        trained(
            ranks_config(folder, ranks, algorithm=algorithm, learner=learner if ranks > 1 else {}),
            range(1, 4),
            groups=told_batch,
        )
        for ranks in (2, 1)
    )
    assert_same_reports(made, expected)
    assert_same_weights(weights, alone)


def test_the_model_of_a_kl_chooses_experts_for_itself(folder: Path) -> None:
    rng = np.random.default_rng(7)
    batch_of_one = assemble([with_experts(random_group(rng), rng)])
    kls: list[float] = []
    for lora in ({}, {"rank": 4, "targets": ["q_proj", "v_proj"]}):
        told = config_of(folder).model_dump(exclude_unset=True)
        told["algorithm"] |= {"kl_coef": 0.1}
        config = JobConfig.model_validate({**told, "lora": lora})
        model = load_model(config.model, config.learner, lora=config.lora)
        numbers = Trainer(model, config, total_steps=3).step(batch_of_one, 1).numbers
        kls.append(numbers["actor/reference_kl"])
    assert kls[0] > 1e-6  # the policy is the reference, but for the experts
    assert kls[1] == pytest.approx(kls[0], rel=1e-4)
