"""Each rule of the configuration's table refuses an example of its own, and says why."""

import pytest
from tinkermq.schemas.config.load_config import load_config
from tinkermq.schemas.config.rules import RULES
from tinkermq.schemas.config.sections import Rule
from tinkermq.schemas.wire.errors import ConfigError

LEAST = ["model.path=m", "env.game=bandit"]
SFT = ["sft.data=[chats.jsonl]"]
AGENT = ["env.game=agent", "agent.command=[run.sh]"]
BY_TURN = ["algorithm.advantage=gae", "algorithm.sample=turn"]
REPLAY = ["algorithm.router_replay=true"]
EXAMPLES = [
    ["algorithm.loss=sft"],
    ["policies.low=m", *SFT],
    ["self_play.past_share=0.5", *SFT],
    ["algorithm.reference.path=m"],
    ["model.attn_implementation=flash_attention_2"],
    ["policies.low=m", "lora.rank=4"],
    ["algorithm.loss=gspo", "algorithm.own_loss=m:f"],
    ["algorithm.correction=icepop", "algorithm.own_correction=m:f"],
    [
        "algorithm.correction=decoupled",
        "algorithm.proximal=loglinear",
        "algorithm.correction_normalise=true",
    ],
    ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"],
    [
        "algorithm.correction=decoupled",
        "algorithm.proximal=loglinear",
        "lora.rank=4",
        "lora.dropout=0.1",
    ],
    ["algorithm.advantage=maxrl", "algorithm.overlong_buffer=64"],
    ["algorithm.advantage=maxrl", "algorithm.length_coef=0.1"],
    ["algorithm.advantage=maxrl", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    ["algorithm.sample=turn", "algorithm.advantage=remax"],
    ["algorithm.gamma=0.9"],
    ["algorithm.filter_equal_rewards=true", "rollout.group_size=1"],
    ["algorithm.length_coef=0.1", "rollout.group_size=1"],
    [*BY_TURN, "algorithm.turn_gamma=0.9"],
    [*BY_TURN, "algorithm.turn_lambda=0.9"],
    [
        "algorithm.advantage=gae",
        "algorithm.turn_lambda=0.9",
        "algorithm.gae_lambda_length=0.1",
    ],
    [*BY_TURN, "critic.bootstrap_cut=true"],
    ["critic.lr=1e-4"],
    ["algorithm.advantage=gae", "critic.warmup_steps=20", "training.num_steps=20"],
    ["algorithm.teacher=job:t", "rollout.temperature=0.7"],
    ["algorithm.teacher=job:t", "training.tasks=external", "training.num_steps=3"],
    [*AGENT, "algorithm.teacher=t", "algorithm.teacher_context=solution"],
    [
        "algorithm.teacher=self",
        "algorithm.teacher_context=solution",
        "algorithm.teacher_context_tokens=4096",
    ],
    [*REPLAY, "generator.engine=vllm", "generator.slots=2", "generator.tensor_parallel=2"],
    [*REPLAY, *AGENT],
    [*REPLAY, "policies.low=m"],
    [*REPLAY, "training.tasks=external", "training.num_steps=3"],
    [*REPLAY, "generator.segment_tokens=2"],
    [*REPLAY, "learner.compile=true"],
    ["rollout.max_turn_tokens=512", "rollout.max_response_tokens=256"],
    ["learner.max_row_tokens=4096", "learner.microbatch_tokens=2048"],
    ["learner.ranks=2"],
    ["learner.ranks=3", "learner.slots=3", "learner.replicas=2"],
    ["learner.ranks=2", "learner.slots=3"],
    ["learner.machines=2"],
    ["learner.context_parallel=2"],
    ["learner.ranks=3", "learner.slots=3", "learner.context_parallel=2"],
    ["learner.ranks=2", "learner.slots=2", "learner.context_parallel=2", "algorithm.loss=gspo"],
    ["learner.ranks=2", "learner.slots=2", "learner.context_parallel=2", "learner.compile=true"],
    ["learner.optimizer=muon", "learner.cpu_offload=true"],
    ["learner.optimizer=muon", "tinker.base=m"],
    ["generator.engine=vllm", "generator.tensor_parallel=2"],
    ["generator.max_context=1024"],
    ["algorithm.overlong_buffer=4096"],
    ["learner.max_row_tokens=100"],
    ["rollout.group_size=4000", "rollout.oversample=97"],
    ["training.tasks=external"],
    ["training.tasks=external", "training.num_steps=3", "training.max_staleness=auto"],
    [
        "training.tasks=external",
        "training.num_steps=3",
        "training.curriculum=success_rate",
        "env.train_data=[x]",
    ],
    ["training.curriculum=success_rate"],
    ["training.curriculum=success_rate", "training.curriculum_tasks=3", "env.train_data=[x]"],
    ["rollout.oversample=2", *SFT],
    ["rollout.oversample=2", "policies.low=m"],
    ["generator.segment_tokens=2", *SFT],
    ["generator.segment_tokens=2", "self_play.past_share=0.5"],
    ["rollout.oversample=2", "algorithm.advantage=remax"],
    ["limits.segment_bytes=65536"],
    ["env.reward.source=function"],
    ["env.reward.source=endpoint"],
    ["env.reward.source=judge", "env.reward.url=http://x"],
    [*AGENT, "algorithm.loss=gspo"],
    [*AGENT, "algorithm.advantage=grpo_per_step"],
    [*AGENT, "algorithm.correction=mis"],
    [*AGENT, "algorithm.correction_masks=[{over: sequence_mean, high: 2}]"],
    [*AGENT, "algorithm.correction_level=sequence"],
    [*AGENT, "algorithm.sample=turn"],
    [*AGENT, "algorithm.overlong_buffer=64"],
    [*AGENT, "algorithm.length_coef=0.1"],
    ["algorithm.branch_credit=own"],
    [*AGENT, "algorithm.branch_credit=own", "algorithm.advantage=remax"],
    [*AGENT, "algorithm.branch_credit=both", "algorithm.advantage=gae"],
    [*AGENT, "algorithm.branch_credit=own", "algorithm.filter_equal_rewards=true"],
    [*AGENT, "policies.low=m"],
    [*AGENT, "self_play.past_share=0.5"],
    [*AGENT, "rollout.oversample=2"],
    [*AGENT, "generator.segment_tokens=2"],
    [*AGENT, "env.reward.source=function", "env.reward.function=package.module:score"],
]


@pytest.mark.parametrize(("rule", "example"), list(zip(RULES, EXAMPLES, strict=True)))
def test_each_rule_refuses_its_example_and_nothing_else_does(
    rule: Rule, example: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, *example])
    assert raised.value.message.startswith(rule.key.partition("{")[0])
    assert rule.because.partition("{")[0] in raised.value.message
    assert "; " not in raised.value.message, "another rule speaks, too"


def test_each_rule_that_is_broken_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, "learner.ranks=2", "training.tasks=external"])
    assert raised.value.message == (
        "learner.ranks (2) is over learner.slots (1); training.tasks=external needs "
        "training.num_steps"
    )
