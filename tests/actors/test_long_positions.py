"""Positions that change beyond a length: of no sequence do they depend on its neighbours."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.transformers.decoder import FedTokens, SlotDecoder
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.model import Scorer
from tinkermq.actors.training.packing import pack
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.model_shape import find_max_positions
from tinkermq.schemas.plan.settings import refuse_models
from tinkermq.schemas.wire.errors import ModelError
from transformers import PreTrainedModel

from tests.support.families import VOCAB, make_model, plain_logprobs

torch.set_num_threads(1)
ORIGINAL, LONGEST = 16, 64
SHORT, LONG = [1.0] * 4, [1.0, 2.0, 4.0, 8.0]


def with_positions(family: str = "phi3", **rotary: Any) -> PreTrainedModel:
    """Return a model of ORIGINAL positions, scaled in some way to LONGEST."""
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **rotary}
    return make_model(
        family,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
    )


def longrope(short: list[float], long: list[float], **scales: float) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **scales}


def moved(model: PreTrainedModel) -> float:
    """Return by how much a long neighbour changes a short and a long sequence, here and there."""
    rng = np.random.default_rng(0)
    short, long, neighbour = (rng.integers(3, VOCAB, num) for num in (ORIGINAL - 4, 40, LONGEST))
    scorer = Scorer(model, temperature=1.0)
    decoder = SlotDecoder("it", model, max_slots=2, max_tokens=LONGEST)

    def learner(*sequences: np.ndarray[Any, Any]) -> torch.Tensor:
        mask = [(np.arange(len(each)) >= 4).astype(np.uint8) for each in sequences]
        rows = [TokenSequence(each, its) for each, its in zip(sequences, mask, strict=True)]
        [packed] = pack(rows, max_row_tokens=128, microbatch_tokens=256, share_prompts=True)
        return scorer.score(packed).logprobs_N[: len(sequences[0]) - 4]

    def engine(*sequences: np.ndarray[Any, Any]) -> torch.Tensor:
        """Prefill all but a token, and decode it for all together."""
        fed = [
            FedTokens(slot, 0, each[:-1].astype(np.int32)) for slot, each in enumerate(sequences)
        ]
        list(decoder.prefill(fed))
        last = np.array([each[-1] for each in sequences], np.int32)
        return decoder.decode(last, np.array([len(each) - 1 for each in sequences]))[0]

    changes: list[float] = []
    with torch.no_grad():
        for own in (short, long):
            for compute in (learner, engine):
                changes.append(float((compute(own, neighbour) - compute(own)).abs().max()))
            torch.testing.assert_close(
                learner(own), plain_logprobs(model, own, 4), atol=1e-5, rtol=0
            )
    return max(changes)


@pytest.mark.parametrize(
    ("family", "same", "other"),
    [
        ("phi3", longrope(LONG, LONG), longrope(SHORT, LONG)),
        (
            "phimoe",
            longrope(LONG, LONG, short_mscale=1.2, long_mscale=1.2),
            longrope(LONG, LONG, short_mscale=1.0, long_mscale=1.2),
        ),
    ],
)
def test_positions_scaled_alike_at_all_lengths_do_not_depend_on_the_longest_sequence(
    family: str, same: dict[str, Any], other: dict[str, Any]
) -> None:
    """Those of two scales do, and so are counted up to the original length alone."""
    assert moved(with_positions(family, **same)) < 1e-5
    assert moved(with_positions(family, **other)) > 1e-4


@pytest.mark.parametrize(
    ("rotary", "positions"),
    [
        (longrope(SHORT, LONG), ORIGINAL),
        (longrope(LONG, LONG), LONGEST),
        (longrope(LONG, LONG, short_mscale=1.1, long_mscale=1.2), ORIGINAL),
        ({"rope_type": "dynamic", "factor": 4.0}, LONGEST),
    ],
)
def test_sequences_beyond_positions_that_change_are_refused_at_submission(
    tmp_path: Path, rotary: dict[str, Any], positions: int
) -> None:
    config = with_positions().config.to_dict()
    rope = {**config["rope_parameters"], **rotary}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert find_max_positions(str(tmp_path)) == positions

    def submit(tokens: int) -> None:
        rollout = {"max_prompt_tokens": tokens - 8, "max_response_tokens": 8, "max_turn_tokens": 8}
        job = {"model": {"path": str(tmp_path)}, "env": {"game": "sums"}, "rollout": rollout}
        refuse_models(JobConfig.model_validate(job))

    submit(positions)
    with pytest.raises(ModelError, match=f"has positions for {positions}") as refused:
        submit(positions + 1)
    assert "long_factor" in refused.value.hint
