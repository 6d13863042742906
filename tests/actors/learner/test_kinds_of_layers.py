"""What a learner may do to any model, done to one of each kind of layers: the step is the same."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.experts import RouterReplay
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Parallel, SequenceGroup, check_divisible
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.actors.training.rank_batches import RankPacker
from tinkermq.actors.training.ranks import Ranks
from tinkermq.actors.training.step import StepReport, Trainer
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.errors import ConfigError, ModelError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.actors.learner.test_ranks import (
    assert_same_reports,
    assert_same_weights,
    config_of,
)
from tests.actors.learner.test_router_replay import with_experts
from tests.support.families import make_model, plain_logprobs
from tests.support.groups import random_group
from tests.support.second_rank import SecondRank, second_rank

torch.set_num_threads(1)

FAMILIES = ("deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_5_moe_text")
"""Latent attention, windows, sinks, and recurrent layers with experts."""
REPLAYS = ("gpt_oss", "qwen3_5_moe_text")
CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 0.1}}
EXPERTS: dict[str, Any] = {"algorithm": {"router_replay": True}}
RECOMPUTED: dict[str, Any] = {"learner": {"gradient_checkpointing": True}}
OFFLOADED: dict[str, Any] = {"learner": {"offload_activations": True}}
DIVIDED: dict[str, Any] = {"learner": {"context_parallel": 2}}

Trained = tuple[StepReport, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind."""
    made = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(family).save_pretrained(made / family)
    return {family: made / family for family in FAMILIES}


@pytest.fixture(scope="module")
def second() -> Iterator[Connection]:
    """The process of the second rank."""
    with second_rank() as orders:
        yield orders


def groups_of(sections: dict[str, Any]) -> list[Group]:
    """Return the groups of a step, with the experts of each token where they are replayed."""
    rng = np.random.default_rng(1)
    groups = [random_group(rng, number, size=3) for number in range(3)]
    return [with_experts(each, rng, 4) if sections == EXPERTS else each for each in groups]


def train(folder: Path, sections: dict[str, Any], second: Connection | None = None) -> Trained:
    """Train one step, alone or with a second rank."""
    config = config_of(folder, 1 if second is None else 2, **sections)
    ranks = Ranks(config) if second is None else SecondRank(config, second)
    try:
        policies = Policies.open(
            config, load_models(config, None), ranks, total_steps=4, folder=None
        )
        return policies.step(groups_of(sections), 1), policies.gather()[MAIN]
    finally:
        ranks.close()


@cache
def plain(folder: Path, kind: str) -> Trained:
    """Return the step of one process without a feature."""
    return train(folder, {"critic": CRITIC, "experts": EXPERTS}.get(kind, {}))


def assert_same(made: Trained, expected: Trained) -> None:
    assert_same_reports([made[0]], [expected[0]])
    assert_same_weights(made[1], expected[1])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_and_offloaded_layers_train_alike(folders: dict[str, Path], family: str) -> None:
    for sections in (RECOMPUTED, OFFLOADED):
        assert_same(train(folders[family], sections), plain(folders[family], "policy"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kind", "sections"),
    [
        *((family, "policy", RECOMPUTED) for family in FAMILIES),
        *((family, "critic", CRITIC) for family in FAMILIES),
        *((family, "experts", EXPERTS) for family in REPLAYS),
        *((family, "policy", DIVIDED) for family in FAMILIES if "qwen3_5" not in family),
    ],
)
def test_two_ranks_train_any_layers_as_one_does(
    folders: dict[str, Path], second: Connection, family: str, kind: str, sections: dict[str, Any]
) -> None:
    folder = folders[family]
    assert_same(train(folder, sections, second), plain(folder, kind))


@pytest.mark.full
def test_a_critic_that_reads_a_row_each_is_given_such_rows(folders: dict[str, Path]) -> None:
    """The policy packs its rows, or reads them flat; the critic has recurrent layers."""
    critic = {"lr": 0.1, "path": str(folders["qwen3_5_moe_text"])}
    made = [
        train(
            folders["gemma3_text"],
            CRITIC
            | {"critic": critic}
            | {"model": {"path": str(folders["gemma3_text"]), "attn_implementation": attention}},
        )
        for attention in ("sdpa", "varlen")
    ]
    assert_same(made[1], made[0])
    assert made[0][0].numbers["critic/grad_norm"] > 0


def test_what_cannot_be_divided_is_refused_with_the_reason() -> None:
    for family, size, reason in (
        ("lfm2", 2, "it has recurrent layers"),
        ("gemma3_text", 4, "num_key_value_heads=2"),
        ("gpt_oss", 3, "num_attention_heads=4"),
        ("gpt2", 3, "num_attention_heads=4"),
    ):
        with pytest.raises(ConfigError, match=rf"context_parallel={size} cannot divide .*{reason}"):
            check_divisible(make_model(family), size)
    check_divisible(make_model("gpt_oss"), 2)


@pytest.mark.parametrize("family", ["deepseek_v3", "granitemoehybrid", "gemma3_text"])
def test_routers_that_cannot_be_replayed_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match=r"algorithm\.router_replay: "):
        RouterReplay(make_model(family))


# -- rows of recurrent models ----------------------------------------------------------------------


class Averages(nn.Module):
    """A recurrent layer: a decaying average of all tokens before, of the sequence if it is told.

    `told` is the argument by which it knows where sequences begin, as kernels do; none: ignored.
    """

    def __init__(self, width: int, told: str) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.told = told

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Average each sequence of a flat row, or each row."""
        told: Tensor | None = options.get(self.told)
        if told is None:
            ends = [0, hidden_states.shape[1]]
        elif self.told == "seq_idx":
            _, counts = told[0].unique_consecutive(return_counts=True)
            ends = [0, *counts.cumsum(0).tolist()]
        else:
            ends = told.tolist()
        projected = self.project(hidden_states)
        averages: list[Tensor] = []
        for first, end in pairwise(ends):
            state = torch.zeros_like(projected[:, 0])
            for column in range(first, end):
                state = 0.8 * state + projected[:, column]
                averages.append(state)
        return torch.stack(averages, 1)


def scored(told: str, attention: Any) -> tuple[Scorer, Tensor, Tensor, Tensor]:
    """Return a hybrid's scorer, log-probs, gradients, and log-probs by its own pass."""
    model = cast(Any, make_model("qwen3_5_text"))
    torch.manual_seed(1)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = Averages(model.config.hidden_size, told)
    inside = Parallel().place(model, LearnerConfig(), attention)
    scorer = Scorer(model, temperature=1.0, inside=inside)
    sequences = assemble(groups_of({})).sequences
    micros = pack(
        sequences,
        max_row_tokens=96,
        microbatch_tokens=192,
        share_prompts=scorer.shares_columns,
        one_per_row=scorer.one_per_row,
    )
    made = torch.cat([scorer.score(micro).logprobs_N for micro in micros])
    made.sum().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    own = [
        plain_logprobs(model, item.token_ids, 1)[torch.as_tensor(item.mask[1:] == 1)]
        for item in sequences
    ]
    ours = torch.empty_like(made).index_copy(0, torch.cat([m.index_N for m in micros]), made)
    return scorer, ours.detach(), gradient, torch.cat(own)


def test_recurrent_layers_that_know_where_sequences_begin_read_flat_rows() -> None:
    expected = scored("", "sdpa")
    for told, attention, is_flat in (
        ("cu_seq_lens_q", "varlen", True),
        ("seq_idx", "varlen", True),
        ("", "varlen", False),
        ("cu_seq_lens_q", "sdpa", False),
    ):
        scorer, logprobs, gradient, own = scored(told, attention)
        assert (scorer.flat_rows, scorer.one_per_row) == (is_flat, not is_flat), told
        torch.testing.assert_close(logprobs, own, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient, expected[2], atol=1e-4, rtol=1e-4)


def test_long_rows_of_a_model_that_counts_columns_hold_one_sequence(tmp_path: Path) -> None:
    """Llama 4's layers without rotary positions scale queries by the column, from 8,192 on."""
    made = make_model("llama4_text")
    made.config.floor_scale, made.config.attn_scale = 32, 1e3
    made.save_pretrained(tmp_path)
    config = config_of(tmp_path, 1)
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=4)
    rng = np.random.default_rng(0)
    groups = assemble([random_group(rng, size=6, longest=12)])
    own = torch.cat(
        [
            plain_logprobs(cast(Any, trainer.model), item.token_ids, 1)[
                torch.as_tensor(item.mask[1:] == 1)
            ]
            for item in groups.sequences
        ]
    )
    ours = torch.zeros_like(own)
    with torch.no_grad():
        for micro in trainer._packer.pack(
            groups, torch.ones_like(groups.group_S, dtype=torch.bool)
        ):
            ours[micro.index_N] = trainer._scorer.score(micro).logprobs_N
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)
    divided = config_of(tmp_path, 2, **DIVIDED)
    parallel = Parallel(sequence=SequenceGroup(None, size=2, place=0))
    with pytest.raises(ConfigError, match="takes columns for positions from 32 on"):
        RankPacker(trainer.model, trainer._scorer, divided.learner, parallel, None)


# -- what balances experts -------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "lfm2_moe"])
def test_biases_that_only_choose_experts_are_not_trained(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    for name, tensor in {**dict(model.named_buffers()), **dict(model.named_parameters())}.items():
        if name.endswith(("correction_bias", "expert_bias")):
            nn.init.normal_(tensor)
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path, 1, **CRITIC, learner={"weight_decay": 0.1})
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=4)
    trainer.step(assemble(groups_of({})), 1)
    assert trainer.critic is not None
    before = model.state_dict()
    for after in (trainer.model.state_dict(), trainer.critic.model.state_dict()):
        biases = [name for name in after if name.endswith(("correction_bias", "expert_bias"))]
        assert biases
        for name in biases:
            whole = name.replace("decoder.", "model.", 1)
            assert torch.equal(after[name], before[whole]), name


class ReadNumbers(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors, each of which would await a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and do it."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_rows_are_read_without_a_number_from_a_tensor(family: str) -> None:
    model = make_model(family)
    attention = "sdpa" if family == "gemma3_text" else "varlen"
    inside = Parallel().place(model, LearnerConfig(), attention)
    scorer = Scorer(model, temperature=1.0, inside=inside)
    [micro, *_] = pack(
        assemble(groups_of({})).sequences,
        max_row_tokens=96,
        microbatch_tokens=96,
        one_per_row=scorer.one_per_row,
    )
    with torch.no_grad(), ReadNumbers() as read:
        scorer.states_UD(micro)
    assert read.count == 0
