"""Rules between configuration keys: one table of refused combinations.

Conditions within a section are declared at the key by `when`. Rules that span sections or compare
values are rows here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .algorithm import LOSSES_OF_SEQUENCES, OF_WHOLE_SEQUENCES, TEACHER_RULES
from .sections import MAX_EPISODES, Rule

if TYPE_CHECKING:
    from .job import JobConfig


# Options that agent programs exclude.
#
# A program's episode is a tree of calls, and its rows are paths of that tree. Baselines, sequence
# means and training count episodes, whatever their number of rows; per-turn values follow the
# calls. Options that need one row per episode are refused.

_BY_CALL = ("gae", "gigpo", "grpo_per_turn", "reinforce_pp")

_ROWS = (
    Rule(
        "algorithm.loss={algorithm.loss}",
        lambda job: job.algorithm.loss in LOSSES_OF_SEQUENCES,
        "weighs a sequence as a whole, and an agent's episode has several: choose another loss",
    ),
    Rule(
        "algorithm.advantage=grpo_per_step",
        lambda job: job.algorithm.advantage == "grpo_per_step",
        "follows one turn after the other, and those of an agent's episode stand in branches: "
        "choose grpo_per_turn, which compares calls of the same place",
    ),
    Rule(
        "algorithm.correction={algorithm.correction}",
        lambda job: job.algorithm.correction in OF_WHOLE_SEQUENCES,
        "keeps or drops a sequence as a whole, and an agent's episode has several: choose tis, "
        "icepop, decoupled or m2po",
    ),
    Rule(
        "algorithm.correction_masks",
        lambda job: any(mask.over != "token" for mask in job.algorithm.correction_masks),
        "keep or drop a sequence as a whole, and an agent's episode has several: set over: token",
    ),
    Rule(
        "algorithm.correction_level=sequence",
        lambda job: (
            job.algorithm.correction == "tis" and job.algorithm.correction_level == "sequence"
        ),
        "weighs a sequence as a whole, and an agent's episode has several: set "
        "algorithm.correction_level=token",
    ),
    Rule(
        "algorithm.sample=turn",
        lambda job: job.algorithm.sample == "turn",
        "compares turns of the same number, and those of an agent's episodes stand in branches: "
        "set algorithm.sample=episode",
    ),
    Rule(
        "algorithm.overlong_buffer",
        lambda job: job.algorithm.overlong_buffer,
        "counts up to the limit of one conversation, and an agent's episode has several: remove "
        "it, or bound episodes by agent.max_tokens",
    ),
)


def _of_programs(when: "Callable[[JobConfig], Any]") -> "Callable[[JobConfig], Any]":
    return lambda job: job.agent.runs_programs and when(job)


_BRANCHES = "algorithm.branch_credit={algorithm.branch_credit}"


def _of_task_folders(when: "Callable[[JobConfig], Any]") -> "Callable[[JobConfig], Any]":
    return lambda job: job.has_tasks and when(job)


_TESTS = "has no effect, since the tests of Harbor tasks give the reward: remove it"

AGENT_RULES = (
    Rule(
        "harbor:",
        _of_task_folders(lambda job: not job.agent.command),
        "names tasks for programs, and agent.command is empty: set it",
    ),
    Rule(
        "harbor:",
        _of_task_folders(lambda job: not all(job.task_sources)),
        "names tasks that are judged by their own tests, and env.train_data and env.val_data hold "
        "files, too: give the one or the other",
    ),
    Rule("agent.reward", _of_task_folders(lambda job: job.agent.reward), _TESTS),
    Rule(
        "agent.image={agent.image}",
        _of_task_folders(lambda job: job.agent.image),
        "has no effect, since Harbor tasks name their images: remove it",
    ),
    *(replace(rule, when=_of_programs(rule.when)) for rule in _ROWS),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit != "episode" and not job.agent.runs_programs,
        "credits branches of agent programs, and this run has none: remove it",
    ),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit != "episode" and job.algorithm.advantage == "remax",
        "compares branches with those of their role, and remax with a greedy episode, which need "
        "not have one: choose another advantage, such as grpo",
    ),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit == "both" and job.algorithm.advantage == "gae",
        "adds two advantages, and the critic of gae learns what one is compared with: set "
        "algorithm.branch_credit=own or episode",
    ),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit != "episode" and job.algorithm.filter_equal_rewards,
        "lets branches differ where episodes do not, and algorithm.filter_equal_rewards drops "
        "groups by the rewards of episodes: remove one of them",
    ),
    Rule(
        "policies",
        _of_programs(lambda job: job.policies),
        "are those of a game's roles, and an agent program has none: remove them",
    ),
    Rule(
        "self_play.past_share",
        _of_programs(lambda job: job.self_play.past_share),
        "is for games with roles, and an agent program has none: remove it",
    ),
    Rule(
        "rollout.oversample",
        _of_programs(lambda job: job.rollout.oversample),
        "cuts the longest episodes of a task, which is not built for agent programs: remove it",
    ),
    Rule(
        "generator.segment_tokens",
        _of_programs(lambda job: job.generator.segment_tokens),
        "has no effect in an agent run, where each call is written down: remove it",
    ),
    Rule(
        "env.reward.source={env.reward.source}",
        _of_programs(lambda job: job.env.reward.source != "game"),
        "asks for the rewards of games, and an agent program's come from agent.reward or from "
        "what it posts itself: remove env.reward",
    ),
)


_WITHOUT_PLACES = Rule(
    "algorithm.advantage={algorithm.advantage}",
    lambda job: job.algorithm.advantage in _BY_CALL and not job.agent.runs_programs,
    "follows rewards from turn to turn, and only in an agent run rows say which call led to which: "
    "choose an advantage of whole episodes, such as grpo, rloo or reinforce_pp_baseline",
)


def why_no_rows(job: "JobConfig") -> str | None:
    """Return why a run cannot train episodes of several rows; None: it can."""
    rules = (*_ROWS, _WITHOUT_PLACES)
    return next((rule.sentence(job) for rule in rules if rule.when(job)), None)


_DISCOUNTED = ("gae", "gigpo", "grpo_per_turn", "grpo_per_step", "reinforce_pp")
_NOT_BY_TURN = ("remax", "grpo_per_turn", "grpo_per_step", "gigpo")


def broken_rules(job: "JobConfig") -> Iterator[str]:
    """Yield a sentence for each rule that a configuration breaks."""
    for rule in RULES:
        if rule.when(job):
            yield rule.sentence(job)


def _needs(source: str, key: str) -> Rule:
    return Rule(
        f"env.reward.source={source}",
        lambda job: job.env.reward.source == source and getattr(job.env.reward, key) is None,
        f"needs {key}: set env.reward.{key}",
    )


def _not_with_maxrl(key: str, when: "Callable[[JobConfig], Any]") -> Rule:
    return Rule(
        key,
        lambda job: job.algorithm.advantage == "maxrl" and when(job),
        "takes rewards under 0, and algorithm.advantage=maxrl divides by the group's mean reward: "
        f"choose another advantage, or remove {key.partition('=')[0]}",
    )


def _not_with_gdpo(key: str, when: "Callable[[JobConfig], Any]") -> Rule:
    def applies(job: "JobConfig") -> Any:
        is_read = job.algorithm.advantage != "gdpo" or job.algorithm.own_advantage
        return not is_read and when(job)

    return Rule(
        key,
        applies,
        "goes by the game's reward, and algorithm.advantage=gdpo by algorithm.reward_components: "
        f"choose another advantage, or remove {key.partition('=')[0]}",
    )


def _over(key: str, limit: str) -> Rule:
    value, most = attrgetter(key), attrgetter(limit)
    return Rule(
        f"{key} ({{{key}}})", lambda job: value(job) > most(job), f"is over {limit} ({{{limit}}})"
    )


def _needs_whole_sequences(job: "JobConfig") -> bool:
    algorithm = job.algorithm
    return algorithm.loss in LOSSES_OF_SEQUENCES or algorithm.corrects_sequences


def _one_turn(job: "JobConfig") -> bool:
    return job.algorithm.sample == "turn" or job.agent.runs_programs


def _whole_episodes(key: str, when: "Callable[[JobConfig], Any]") -> tuple[Rule, Rule]:
    return (
        Rule(key, lambda job: when(job) and job.sft.data, "has no effect in an SFT run: remove it"),
        Rule(
            key,
            lambda job: when(job) and (job.policies or job.self_play.past_share),
            "is not built for games with roles: remove it",
        ),
    )


def _no_replay(when: "Callable[[JobConfig], Any]", because: str) -> Rule:
    return Rule(
        "algorithm.router_replay", lambda job: job.algorithm.router_replay and when(job), because
    )


_REPLAY_RULES = (
    _no_replay(
        lambda job: (
            job.generator.engine == "vllm"
            and (job.generator.compile or job.generator.tensor_parallel > 1)
        ),
        "gets vLLM's routers on one GPU and without compilation only: set "
        "generator.compile=false and generator.tensor_parallel=1, or generator.engine=transformers",
    ),
    _no_replay(
        lambda job: job.agent.runs_programs,
        "is not built for agent programs, whose calls are written down without it: remove it",
    ),
    _no_replay(
        lambda job: job.policies,
        "is not built for several models: remove it, or policies",
    ),
    _no_replay(
        lambda job: job.training.tasks == "external",
        "needs the routers' choices, which external agents do not record: remove it",
    ),
    _no_replay(
        lambda job: job.generator.segment_tokens,
        "is not recorded in the segments of generator.segment_tokens: remove one of them",
    ),
    _no_replay(
        lambda job: job.learner.compile,
        "changes layers as they compute, which learner.compile was not tried with: remove one of "
        "them",
    ),
)

_SFT_RULES = (
    Rule(
        "algorithm.loss=sft",
        lambda job: job.algorithm.loss == "sft" and not job.sft.data,
        "needs sft.data, and a run of kind sft",
    ),
    Rule(
        "policies",
        lambda job: job.policies and job.sft.data,
        "of an SFT run are not built: train them by reinforcement, or one policy",
    ),
    Rule(
        "self_play.past_share",
        lambda job: job.self_play.past_share and job.sft.data,
        "has no effect in an SFT run: remove it",
    ),
    Rule(
        "algorithm.reference",
        lambda job: "reference" in job.algorithm.model_fields_set and not job.algorithm.kl_coef,
        "has no effect while algorithm.kl_coef is {algorithm.kl_coef!r}: remove it, or set "
        "algorithm.kl_coef",
    ),
)

RULES = (
    *_SFT_RULES,
    Rule(
        "model.attn_implementation={model.attn_implementation}",
        lambda job: (
            job.model.attn_implementation == "flash_attention_2" and job.learner.dtype == "float32"
        ),
        "does not compute in float32: set learner.dtype=bfloat16, or "
        "model.attn_implementation=sdpa",
    ),
    Rule(
        "policies",
        lambda job: job.policies and job.lora.rank,
        "with lora.rank are not built: train all weights, or one policy",
    ),
    Rule(
        "env.game=mcp",
        lambda job: job.env.game == "mcp" and job.env.reward.source == "game",
        "gives no reward of its own: set env.reward.source to function, endpoint or judge",
    ),
    # -- the algorithm
    Rule(
        "algorithm.loss",
        lambda job: job.algorithm.own_loss and "loss" in job.algorithm.model_fields_set,
        "has no effect beside algorithm.own_loss: remove one of them",
    ),
    Rule(
        "algorithm.correction",
        lambda job: job.algorithm.own_correction and "correction" in job.algorithm.model_fields_set,
        "has no effect beside algorithm.own_correction: remove one of them",
    ),
    Rule(
        "algorithm.proximal=loglinear",
        lambda job: (
            job.algorithm.correction == "decoupled"
            and job.algorithm.proximal == "loglinear"
            and job.algorithm.weighs_whole_batches
        ),
        "moves with each update, and algorithm.correction_normalise and "
        "correction_denominator=kept weigh the batch before the first: set "
        "algorithm.proximal=forward",
    ),
    Rule(
        "algorithm.kl_estimator=k1",
        lambda job: (
            job.algorithm.kl_coef
            and job.algorithm.kl_estimator == "k1"
            and job.algorithm.kl_in == "loss"
        ),
        "has no effect in the loss, where its gradient is zero in expectation: set "
        "algorithm.kl_estimator to k3, k2 or k1+, or algorithm.kl_in=reward",
    ),
    Rule(
        "algorithm.proximal=loglinear",
        lambda job: job.lora.dropout and job.algorithm.proximal == "loglinear",
        "saves a forward pass, which lora.dropout needs: set algorithm.proximal=forward, or "
        "lora.dropout=0",
    ),
    _not_with_maxrl("algorithm.overlong_buffer", lambda job: job.algorithm.overlong_buffer),
    _not_with_maxrl("algorithm.length_coef", lambda job: job.algorithm.length_coef),
    _not_with_maxrl(
        "algorithm.kl_in=reward",
        lambda job: job.algorithm.kl_coef and job.algorithm.kl_in == "reward",
    ),
    _not_with_gdpo("algorithm.overlong_buffer", lambda job: job.algorithm.overlong_buffer),
    _not_with_gdpo("algorithm.length_coef", lambda job: job.algorithm.length_coef),
    _not_with_gdpo(
        "algorithm.kl_in=reward",
        lambda job: job.algorithm.kl_coef and job.algorithm.kl_in == "reward",
    ),
    _not_with_gdpo(
        "algorithm.filter_equal_rewards", lambda job: job.algorithm.filter_equal_rewards
    ),
    Rule(
        "algorithm.advantage=passk",
        lambda job: job.algorithm.advantage == "passk" and job.rollout.group_size == 1,
        "compares the best episode of a group with the second and has no effect while "
        "rollout.group_size is 1: raise it",
    ),
    Rule(
        "algorithm.sample=turn",
        lambda job: job.algorithm.sample == "turn" and job.algorithm.advantage in _NOT_BY_TURN,
        "cannot be used with algorithm.advantage={algorithm.advantage}, which compares episodes or "
        "turns in its own way: choose another advantage, or algorithm.sample=episode",
    ),
    Rule(
        "algorithm.gamma",
        lambda job: (
            job.algorithm.gamma is not None
            and job.algorithm.advantage not in _DISCOUNTED
            and (job.algorithm.sample, job.algorithm.turn_reward) != ("turn", "return")
        ),
        "has no effect while algorithm.advantage is {algorithm.advantage!r} and algorithm.sample "
        "is {algorithm.sample!r}: remove it, or set algorithm.advantage to one of "
        f"{', '.join(_DISCOUNTED)}, or algorithm.sample to turn",
    ),
    Rule(
        "algorithm.filter_equal_rewards",
        lambda job: job.algorithm.filter_equal_rewards and job.rollout.group_size == 1,
        "drops every group while rollout.group_size is 1: raise it",
    ),
    Rule(
        "algorithm.length_coef",
        lambda job: job.algorithm.length_coef and job.rollout.group_size == 1,
        "compares the lengths of a group's episodes and has no effect while rollout.group_size is "
        "1: raise it",
    ),
    *(
        Rule(
            f"algorithm.{key}",
            lambda job, key=key: getattr(job.algorithm, key) is not None and _one_turn(job),
            "compares turns of an episode, but samples here are single turns, or calls of an "
            "agent: remove it, or set algorithm.sample=episode",
        )
        for key in ("turn_gamma", "turn_lambda")
    ),
    Rule(
        "algorithm.turn_lambda",
        lambda job: job.algorithm.turn_lambda is not None and job.algorithm.gae_lambda_length,
        "cannot be used with algorithm.gae_lambda_length, which gives all tokens of an episode one "
        "λ: remove one of them",
    ),
    Rule(
        "critic.bootstrap_cut",
        lambda job: job.critic.bootstrap_cut and _one_turn(job),
        "is for episodes that are one sample each: remove it, or set algorithm.sample=episode",
    ),
    Rule(
        "critic",
        lambda job: job.critic.model_fields_set and job.algorithm.advantage != "gae",
        "has no effect while algorithm.advantage is {algorithm.advantage!r}: remove the section, "
        "or set algorithm.advantage to gae",
    ),
    Rule(
        "critic.warmup_steps ({critic.warmup_steps})",
        lambda job: job.critic.warmup_steps >= (job.training.num_steps or float("inf")),
        "leaves none of training.num_steps ({training.num_steps}) to train the policy: lower it",
    ),
    *TEACHER_RULES,
    *_REPLAY_RULES,
    # -- lengths and slots
    _over("rollout.max_turn_tokens", "rollout.max_response_tokens"),
    Rule(
        "learner.max_row_tokens ({learner.max_row_tokens})",
        lambda job: job.learner.max_row_tokens > job.learner.pass_tokens,
        "is over learner.microbatch_tokens ({learner.microbatch_tokens})",
    ),
    _over("learner.ranks", "learner.slots"),
    Rule(
        "learner.ranks ({learner.ranks})",
        lambda job: job.learner.ranks % job.learner.replicas,
        "cannot be divided into learner.replicas ({learner.replicas}) copies of as many ranks "
        "each: make it a multiple",
    ),
    Rule(
        "learner.slots ({learner.slots})",
        lambda job: job.learner.slots > job.learner.ranks and job.learner.slots % job.learner.ranks,
        "cannot be divided over learner.ranks ({learner.ranks}) in equal parts: make it a multiple",
    ),
    _over("learner.machines", "learner.ranks"),
    _over("learner.context_parallel", "learner.ranks"),
    Rule(
        "learner.ranks ({learner.ranks})",
        lambda job: (
            job.learner.ranks > job.learner.context_parallel
            and job.learner.ranks % job.learner.context_parallel
        ),
        "cannot be divided into groups of learner.context_parallel ({learner.context_parallel}): "
        "make it a multiple",
    ),
    Rule(
        "learner.context_parallel ({learner.context_parallel})",
        lambda job: job.learner.context_parallel > 1 and _needs_whole_sequences(job),
        "divides sequences, and algorithm.loss={algorithm.loss} with "
        "algorithm.correction={algorithm.correction} at level {algorithm.correction_level}, or one "
        "of algorithm.correction_masks, needs them whole: choose another loss, correction or mask",
    ),
    Rule(
        "learner.compile",
        lambda job: job.learner.compile and job.learner.context_parallel > 1,
        "was not built for learner.context_parallel over 1: remove one of them",
    ),
    Rule(
        "learner.offload_activations",
        lambda job: job.learner.offloads and job.learner.gradient_checkpointing is False,
        "keeps the inputs of layers that are computed again, which "
        "learner.gradient_checkpointing=false forbids: remove one of them",
    ),
    Rule(
        "learner.optimizer=muon",
        lambda job: job.learner.optimizer == "muon" and job.learner.cpu_offload,
        "multiplies matrices where the optimiser's state is, which learner.cpu_offload keeps in "
        "the machine's memory: remove one of them",
    ),
    Rule(
        "learner.optimizer",
        lambda job: job.tinker.base and "optimizer" in job.learner.model_fields_set,
        "has no effect in a service of the Tinker API, whose programs update by AdamW: remove it",
    ),
    *(
        Rule(
            f"placement=colocated with {key}={{{key}}}",
            lambda job, get=attrgetter(key): job.placement == "colocated" and get(job) != 1,
            f"is for one learner and one generator on one GPU: set {key}=1, or remove placement",
        )
        for key in ("learner.slots", "generator.slots", "generator.count")
    ),
    Rule(
        "generator.sleep={generator.sleep}",
        lambda job: job.placement == "separate" and job.generator.sleep != "auto",
        "has no effect while placement is separate: remove one of them",
    ),
    Rule(
        "placement=colocated",
        lambda job: job.placement == "colocated" and job.sft.data and not job.generator_slots,
        "has no effect in an SFT run that its generator does not validate, and so holds no slot: "
        "remove it",
    ),
    Rule(
        "generator.sleep=always",
        lambda job: job.generator.sleep == "always" and job.sft.data,
        "is not built for SFT runs, whose learner does not wait for the engine: remove it",
    ),
    _over("generator.tensor_parallel", "generator.slots"),
    Rule(
        "evaluation.slots ({evaluation.slots})",
        lambda job: 0 < job.evaluation.slots < job.generator.tensor_parallel,
        "is too few for generator.tensor_parallel ({generator.tensor_parallel}): an evaluator has "
        "the engine of a generator",
    ),
    Rule(
        "generator.max_context ({generator.max_context})",
        lambda job: (
            not job.tinker.base  # whose users say the lengths of each request
            and (job.generator.max_context or float("inf")) < job.rollout.max_tokens
        ),
        "is under rollout.max_prompt_tokens + rollout.max_response_tokens ({rollout.max_tokens})",
    ),
    Rule(
        "algorithm.overlong_buffer ({algorithm.overlong_buffer})",
        lambda job: job.algorithm.overlong_buffer > job.rollout.response_limit,
        "is over {rollout.response_limit}, the tokens at which an episode is cut "
        "(rollout.max_turn_tokens with one turn, else rollout.max_response_tokens)",
    ),
    Rule(
        "learner.max_row_tokens ({learner.max_row_tokens})",
        lambda job: job.rollout.max_tokens > job.learner.max_row_tokens,
        "is under the {rollout.max_tokens} tokens that an episode may have "
        "(rollout.max_prompt_tokens + rollout.max_response_tokens): raise learner.max_row_tokens "
        "and learner.microbatch_tokens",
    ),
    Rule(
        "rollout.group_size + rollout.oversample",
        lambda job: job.rollout.group_size + job.rollout.oversample > MAX_EPISODES,
        f"is over {MAX_EPISODES}, the most episodes that a task can have",
    ),
    # -- tasks and episodes
    Rule(
        "training.num_epochs={training.num_epochs}",
        lambda job: job.training.num_epochs is not None and job.training.num_steps is not None,
        "has no effect beside training.num_steps={training.num_steps}, which ends the run: set "
        "training.num_steps, or set it to null",
    ),
    Rule(
        "training.tasks=external",
        lambda job: job.training.tasks == "external" and job.training.num_steps is None,
        "needs training.num_steps",
    ),
    Rule(
        "training.max_staleness=auto",
        lambda job: job.training.tasks == "external" and job.training.max_staleness == "auto",
        "measures the run's own generators, and training.tasks=external has none: set a number",
    ),
    Rule(
        "training.curriculum",
        lambda job: job.training.tasks == "external" and job.training.curriculum != "none",
        "has no effect while training.tasks is external: remove it",
    ),
    Rule(
        "training.curriculum",
        lambda job: (
            job.training.curriculum != "none"
            and not job.env.train_data
            and job.training.curriculum_tasks is None
        ),
        "needs tasks that come again: set training.curriculum_tasks, since the game generates its "
        "states",
    ),
    Rule(
        "training.curriculum_tasks",
        lambda job: job.env.train_data and job.training.curriculum_tasks is not None,
        "has no effect while env.train_data is set: remove it",
    ),
    *_whole_episodes("rollout.oversample", lambda job: job.rollout.oversample),
    *_whole_episodes("generator.segment_tokens", lambda job: job.generator.segment_tokens),
    Rule(
        "rollout.oversample",
        lambda job: job.rollout.oversample and job.algorithm.advantage == "remax",
        "cuts long episodes, and the greedy baseline of algorithm.advantage=remax would stand for "
        "all: choose one of them",
    ),
    Rule(
        "limits.segment_bytes",
        lambda job: "segment_bytes" in job.limits.model_fields_set and not job.keeps_segments,
        "has no effect while generator.segment_tokens is 0: remove it",
    ),
    _needs("function", "function"),
    _needs("endpoint", "url"),
    _needs("judge", "judge"),
    *AGENT_RULES,
)
