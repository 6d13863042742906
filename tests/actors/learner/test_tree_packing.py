"""Rows that are paths of trees take the columns of distinct tokens only, and stay what they are."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.policy.vision import load_image_reader
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.micro_batch import MicroBatch, TokenSequence
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import block_causal_mask, pack
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.rank_batches import share_sequences
from tinkermq.actors.training.step import Trainer
from tinkermq.actors.training.varlen import flatten
from tinkermq.schemas.config.job import JobConfig, ModelConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.wire.errors import ConfigError, DataError
from torch import Tensor

from tests.support.groups import make_group, make_trajectory
from tests.support.images import IMAGE_ID, load, make_vision_model, png, seeing_logprobs

torch.set_num_threads(1)
SMALL = png(16, 16)


def paths_of(seed: int, vocab: int = 250) -> list[TokenSequence]:
    """Random paths of a random tree under one beginning, each generated piece trained in one."""
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(1, vocab, rng.integers(2, 12))]
    parents, generated = [-1], [0]
    for number in range(1, rng.integers(2, 14)):
        parents.append(int(rng.integers(max(0, number - 4), number)))
        pieces.append(rng.integers(1, vocab, rng.integers(1, 9)))
        generated.append(int(rng.random() < 0.7))
    found: list[TokenSequence] = []
    trained: set[int] = set()
    for leaf in rng.permutation(len(pieces))[: rng.integers(1, len(pieces) + 1)].tolist():
        path: list[int] = []
        while leaf >= 0:
            path.insert(0, leaf)
            leaf = parents[leaf]
        flags = [generated[piece] and piece not in trained for piece in path]
        trained |= set(path)
        mask = np.repeat(flags, [len(pieces[piece]) for piece in path])
        ids = np.concatenate([pieces[piece] for piece in path]).astype(np.int32)
        found.append(TokenSequence(ids, mask.astype(np.uint8), branches=True))
    return found


def contexts(sequences: list[TokenSequence]) -> list[tuple[list[int], int]]:
    """What stands before each generated token, and the token."""
    return [
        (sequence.token_ids[:place].tolist(), int(sequence.token_ids[place]))
        for sequence in sequences
        for place in np.flatnonzero(sequence.mask)
    ]


def seen_contexts(micros: list[MicroBatch], num_tokens: int) -> list[tuple[list[int], int]]:
    """What the column that predicts a token sees, in the order of positions, and the token."""
    found: list[tuple[list[int], int]] = [([], -1)] * num_tokens
    for micro in micros:
        mask_BTT = block_causal_mask(micro.seen_until_BT)[:, 0]
        for n, index in enumerate(micro.index_N.tolist()):
            seen_T = mask_BTT[micro.row_N[n], micro.source_col_N[n]]
            positions = micro.position_ids_BT[micro.row_N[n]][seen_T]
            assert sorted(positions.tolist()) == list(range(len(positions)))
            ids = micro.input_ids_BT[micro.row_N[n]][seen_T][positions.argsort()].tolist()
            found[index] = (ids, int(micro.target_N[n]))
    return found


def num_distinct(sequences: list[TokenSequence]) -> int:
    """Count the tokens that are needed, those of a common beginning once."""
    prefixes: set[bytes] = set()
    for sequence in sequences:
        at = np.flatnonzero(sequence.mask)
        for end in range(1, int(at[-1]) + 1 if len(at) else 1):
            prefixes.add(sequence.token_ids[:end].tobytes())
    return len(prefixes)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=4), st.integers(110, 400))
def test_each_token_sees_exactly_its_path_wherever_trees_are_cut(
    seeds: list[int], max_row_tokens: int
) -> None:
    sequences = [path for seed in seeds for path in paths_of(seed)]
    for hidden_size in (None, 64):
        micros = pack(
            sequences,
            max_row_tokens=max_row_tokens,
            microbatch_tokens=2 * max_row_tokens,
            share_prompts=True,
            hidden_size=hidden_size,
        )
        expected = contexts(sequences)
        assert seen_contexts(micros, len(expected)) == expected
        for micro in micros:
            assert micro.input_ids_BT.shape[1] <= max_row_tokens
            assert math.prod(micro.input_ids_BT.shape) <= 2 * max_row_tokens
            assert all(a <= b for a, b in pairwise(micro.seq_N.tolist()))


@given(st.integers(0, 10_000))
def test_a_tree_that_fits_into_a_row_costs_its_distinct_tokens(seed: int) -> None:
    sequences = paths_of(seed)
    micros = pack(sequences, max_row_tokens=4096, microbatch_tokens=4096, share_prompts=True)
    assert sum(micro.num_tokens for micro in micros) == num_distinct(sequences)
    assert len(micros) <= 1


def test_a_chain_of_ancestors_by_hand() -> None:
    def path(ids: list[int], mask: list[int]) -> TokenSequence:
        return TokenSequence(np.array(ids), np.array(mask), branches=True)

    sequences = [
        path([1, 2, 3, 4, 9], [0, 0, 0, 0, 1]),
        path([1, 2, 3, 5, 6, 9], [0, 0, 0, 0, 1, 1]),
        path([1, 2, 7, 9], [0, 0, 1, 1]),
        path([1, 2, 3, 5, 8], [0, 0, 1, 0, 1]),
    ]
    [micro] = pack(sequences, max_row_tokens=16, microbatch_tokens=16, share_prompts=True)
    assert micro.input_ids_BT.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert micro.position_ids_BT.tolist() == [[0, 1, 2, 3, 3, 4, 2]]
    assert micro.segment_ids_BT.tolist() == [[1, 1, 1, 1, 2, 3, 4]]
    assert micro.seen_until_BT.tolist() == [[7, 7, 6, 4, 6, 6, 7]]
    assert micro.target_N.tolist() == [9, 6, 9, 7, 9, 3, 8]
    assert micro.source_col_N.tolist() == [3, 4, 5, 1, 6, 1, 4]
    with pytest.raises(ConfigError, match="a sequence of 5 tokens does not fit into a row of 4"):
        pack(sequences, max_row_tokens=4, microbatch_tokens=16, share_prompts=True)


def _scores(scorer: Scorer, micros: list[MicroBatch], num_tokens: int) -> Tensor:
    logprobs_N = torch.zeros(num_tokens)
    for micro in micros:
        logprobs_N = logprobs_N.index_copy(0, micro.index_N, scorer.score(micro).logprobs_N)
    return logprobs_N


@pytest.mark.parametrize("max_row_tokens", [96, 4096])
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_log_probs_and_gradients_are_those_of_a_row_for_each_path(
    folder: Path, attention: Literal["sdpa", "varlen"], max_row_tokens: int
) -> None:
    model = load_model(ModelConfig(path=str(folder)), LearnerConfig())
    inside = Parallel().place(model, LearnerConfig(), attention)
    scorer = Scorer(model, temperature=1.0, inside=inside)
    sequences = [path for seed in range(6) for path in paths_of(seed)]
    num_tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
    found: list[tuple[Tensor, Tensor]] = []
    for share in (False, True):
        model.zero_grad()
        micros = pack(
            sequences, max_row_tokens=max_row_tokens, microbatch_tokens=4096, share_prompts=share
        )
        logprobs_N = _scores(scorer, micros, num_tokens)
        (logprobs_N * torch.linspace(-1, 1, num_tokens)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((logprobs_N.detach(), gradient))
    for alone, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, alone, atol=2e-5, rtol=1e-4)


def rendered_anew(seed: int, num_calls: int, episode: int, reward: float) -> list[Trajectory]:
    """Return the rows of an episode whose history is rendered without the reasoning of calls."""
    rng = np.random.default_rng(seed)
    history = [1, 2, 3, *rng.integers(4, 200, 9).tolist()]
    rows: list[Trajectory] = []
    for call in range(num_calls):
        said = rng.integers(4, 200, 6).tolist()
        rewards = [reward if call == num_calls - 1 else 0.0]
        kind = "main" if call == num_calls - 1 else "edited"
        rows.append(make_trajectory(history, [(said, [])], rewards, episode=episode, kind=kind))
        history = [*history, *said[3:], *rng.integers(4, 200, 4).tolist()]
    return rows[::-1]


def _agent_groups() -> list[Group]:
    groups: list[Group] = []
    for task in range(2):
        rows = [
            row
            for episode in range(3)
            for row in rendered_anew(task, 2 + episode, episode, float(episode == task))
        ]
        groups.append(make_group(rows, task))
    return groups


def tasks_under_one_system_prompt(seed: int) -> list[Group]:
    """Return groups whose prompts begin alike, and whose responses of a group do."""
    rng = np.random.default_rng(seed)
    system = rng.integers(4, 200, 20).tolist()
    groups: list[Group] = []
    for task in range(4):
        prompt = [*system, *rng.integers(4, 200, 6).tolist()]
        begun = rng.integers(4, 200, 5).tolist()
        said = [[*begun, *rng.integers(4, 200, length).tolist()] for length in (1, 2, 4, 7)]
        episodes = [make_trajectory(prompt, [(ids, [])], [float(len(ids) > 7)]) for ids in said]
        groups.append(make_group(episodes, task))
    return groups


@pytest.mark.parametrize("groups", [_agent_groups, lambda: tasks_under_one_system_prompt(0)])
@pytest.mark.parametrize(
    "algorithm",
    [{}, {"loss_agg": "seq-mean-token-mean", "kl_coef": 0.1, "entropy_coef": 0.01}],
)
def test_a_step_is_the_same_with_and_without_sharing(
    folder: Path, algorithm: dict[str, object], groups: Callable[[], list[Group]]
) -> None:
    found: list[tuple[dict[str, float], Tensor]] = []
    for share in (False, True):
        config = JobConfig.model_validate(
            {
                "model": {"path": str(folder)},
                "env": {"game": "none"},
                "algorithm": algorithm,
                "learner": {"lr": 0.1, "eps": 1.0, "share_prompts": share},
            }
        )
        model = load_model(config.model, config.learner)
        report = Trainer(model, config, total_steps=4).step(assemble(groups()), 1)
        weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        found.append((report.numbers, weights))
    (numbers, weights), (shared_numbers, shared_weights) = found
    torch.testing.assert_close(shared_weights, weights, atol=1e-6, rtol=1e-5)
    assert numbers["actor/grad_norm"] > 0
    for name, number in numbers.items():
        assert shared_numbers[name] == pytest.approx(number, rel=1e-3, abs=1e-5), name


def test_an_episode_rendered_anew_at_each_call_takes_a_third_of_the_columns() -> None:
    groups = [make_group(rendered_anew(0, 20, 0, 1.0))]
    sequences = assemble(groups).sequences
    columns = [
        sum(
            math.prod(micro.input_ids_BT.shape)
            for micro in pack(
                sequences, max_row_tokens=1024, microbatch_tokens=4096, share_prompts=share
            )
        )
        for share in (False, True)
    ]
    assert columns[0] >= 3 * columns[1]


def test_tasks_under_one_system_prompt_take_the_columns_of_distinct_tokens() -> None:
    sequences = assemble(tasks_under_one_system_prompt(0)).sequences
    packing = {"max_row_tokens": 512, "microbatch_tokens": 512, "share_prompts": True}
    for hidden_size in (None, 64):
        [micro] = pack(sequences, **packing, hidden_size=hidden_size)
        assert micro.num_tokens == num_distinct(sequences) == 20 + 4 * (6 + 5 + 0 + 1 + 3 + 6)
        assert seen_contexts([micro], len(micro.index_N)) == contexts(sequences)


def test_tasks_that_begin_differently_are_packed_by_prompt() -> None:
    groups = [tasks_under_one_system_prompt(seed)[0] for seed in range(3)]
    sequences = assemble(groups).sequences[::4]
    [micro] = pack(sequences, max_row_tokens=512, microbatch_tokens=512, share_prompts=True)
    [apart] = pack(sequences, max_row_tokens=512, microbatch_tokens=512)
    assert torch.equal(micro.input_ids_BT, apart.input_ids_BT)


def test_a_games_episodes_are_no_trees() -> None:
    [game] = assemble([make_group([make_trajectory([1], [([2], [])], [0.0])])]).sequences
    [agent] = assemble(
        [make_group([make_trajectory([1], [([2], [])], [0.0], kind="main")])]
    ).sequences
    assert (game.branches, agent.branches) == (False, True)


def test_flat_rows_hold_the_same_paths() -> None:
    sequences = [path for seed in range(4) for path in paths_of(seed)]
    expected = contexts(sequences)
    for share in (False, True):
        micros = pack(sequences, max_row_tokens=96, microbatch_tokens=4096, share_prompts=share)
        flat = [flatten(micro) for micro in micros]
        assert seen_contexts(flat, len(expected)) == expected


def test_trees_stay_on_one_rank_where_that_leaves_less_to_do() -> None:
    trees = [assemble([make_group(rendered_anew(seed, 12, 0, 1.0))]).sequences for seed in (1, 2)]
    shares = share_sequences([*trees[0], *trees[1]], ranks=2, hidden_size=64, share_prompts=True)
    assert sorted(shares) == [list(range(12)), list(range(12, 24))]
    lone = share_sequences(trees[0], ranks=3, hidden_size=64, share_prompts=True)
    assert sorted(index for share in lone for index in share) == list(range(12))


def _seen(*images: bytes) -> list[dict[str, object]]:
    parts = [{"type": "image", "image": {"bytes": image, "path": None}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def test_an_image_behind_the_first_answer_is_seen_once_by_all_that_share_it(
    tmp_path: Path,
) -> None:
    make_vision_model(tmp_path, "qwen2_5_vl")
    plain, reader = load(tmp_path), load_image_reader(str(tmp_path))
    assert reader is not None
    shown = [30, *[IMAGE_ID] * 4, 31]
    rows = [
        make_trajectory([3, 70], [([80, 81], shown), ([82, 83], [])], [0.0, 1.0], kind="main"),
        make_trajectory([3, 70, 80, 81, *shown], [([84, 85], [])], [0.0], kind="edited"),
        make_trajectory([3, 70, 80, 86], [([87], [])], [0.0], kind="edited"),
    ]
    rows = [
        row.model_copy(update={"episode": 0, "messages": _seen(*[SMALL] * (number < 2))})
        for number, row in enumerate(rows)
    ]
    group = make_group(rows).with_shared_images()
    config = JobConfig.model_validate({"model": {"path": str(tmp_path)}, "env": {"game": "none"}})
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=4)
    trainer.check_readable(group)
    sequences = assemble([group]).sequences
    [micro] = pack(
        sequences,
        max_row_tokens=64,
        microbatch_tokens=64,
        share_prompts=True,
        see=lambda one: (
            reader.read_images(model, one.token_ids, one.images) if one.images else None
        ),
    )
    assert micro.images is not None
    assert len(micro.images.images) == 1
    assert micro.num_tokens == 10 + 1 + 1 + 4
    scores = Scorer(model, temperature=1.0).score(micro).logprobs_N.detach()
    expected: list[float] = []
    for sequence in sequences:
        # What stands before the image is scored without it.
        text = sequence.token_ids[:4] if sequence.images else sequence.token_ids
        ids = torch.as_tensor(text.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = plain(input_ids=ids).logits[0].log_softmax(-1)
        own = [at for at in np.flatnonzero(sequence.mask) if at < len(text)]
        expected += [float(logprobs[at - 1, ids[0, at]]) for at in own]
        if sequence.images:
            prompt, rest = sequence.token_ids[:10], sequence.token_ids[10:]
            late = seeing_logprobs(plain, reader, prompt, rest, sequence.images)
            expected += late[sequence.mask[10:] == 1].tolist()
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-4)
    wrong = make_group(
        [make_trajectory([3], [([*[IMAGE_ID] * 4], [9]), ([8], [])], [0.0, 0.0], kind="main")]
    )
    lost = wrong.trajectories[0].model_copy(update={"messages": _seen(SMALL)})
    with pytest.raises(DataError, match="generated an image's token"):
        trainer.check_readable(
            wrong.model_copy(update={"trajectories": [lost]}).with_shared_images()
        )
