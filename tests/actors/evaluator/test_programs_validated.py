"""What an evaluation makes of programs: rows are one episode, failures of theirs are zeros."""

import pytest
from tinkermq.actors.evaluator.evaluator import (
    failed_episode,
    is_infrastructure,
    join_rows,
    validation_metrics,
)
from tinkermq.actors.rollout.agent_loop import EpisodeFailed, blaming
from tinkermq.envs.agents.episode import NoCalls
from tinkermq.schemas.config.job import EvaluationConfig
from tinkermq.schemas.wire.errors import (
    BrokerError,
    EngineError,
    GameError,
    RewardError,
    SandboxError,
    TinkermqError,
)

from tests.support.groups import make_trajectory


@pytest.mark.parametrize(
    ("error", "apart"),
    [
        (SandboxError("no namespace"), True),
        (BrokerError("away"), True),
        (EngineError("ended"), True),
        (RewardError("no number"), False),
        (NoCalls("no answered call"), False),
        (GameError("crashed"), False),
    ],
)
def test_only_infrastructure_is_not_counted(error: TinkermqError, apart: bool) -> None:
    with pytest.raises(EpisodeFailed) as raised, blaming("environment"):
        raise error
    assert is_infrastructure(raised.value) is apart


def test_an_episode_of_several_rows_counts_once_with_all_its_rewards() -> None:
    rows = [
        make_trajectory([1, 2], [([3, 4], [])], [1.0], kind="main", info={"outcome": "done"}),
        make_trajectory([1], [([5], [6]), ([7], [])], [0.25, 0.5], kind="edited"),
    ]
    whole = join_rows(rows)
    assert (whole.reward, whole.num_generated) == (1.75, 4)
    assert whole.token_ids[whole.turn_ends].tolist() == [4, 5, 7]
    assert whole.mask[whole.turn_ends].all()
    failed = EpisodeFailed(NoCalls("none"), "environment", 0)
    results = [whole, failed_episode(failed.blame), None]
    numbers = validation_metrics(results, EvaluationConfig(success_reward=-1.0))
    assert numbers["val/mean_score"] == 0.875
    assert numbers["val/success_rate"] == 0.5
    assert numbers["val/num_turns"] == 3.0
    assert (numbers["val/num_episodes"], numbers["val/failed_episodes"]) == (2, 1)
    assert numbers["val_agent/outcome_done"] == 0.5
    assert numbers["val_agent/outcome_no_calls"] == 0.5
    assert "val_game/success" not in numbers
