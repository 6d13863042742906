"""Credit: compute each generated token's advantage from a batch's rewards, as configured.

Shape letters: N generated tokens, S sequences, E episodes, M samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...schemas.config.job import JobConfig
from . import advantages
from .batch import (
    BatchCalls,
    Samples,
    TrainingBatch,
    answered_states,
    episodes,
    returns_by_turn,
    turns,
)
from .losses import rewards_with_kl
from .sequences import is_last_of_sequence, lengths_by_sequence, sum_by_sequence


@dataclass(frozen=True)
class Credit:
    """The advantages of a batch."""

    samples: Samples
    rewards_E: Tensor
    """Reward of each episode, including all configured bonuses and penalties."""
    advantages_N: Tensor
    targets: advantages.ValueTargets | None
    """Targets of the critic, if there is one."""
    kept_S: Tensor
    """bool: trained sequences; the others are excluded from losses and denominators."""
    kept_N: Tensor
    """bool: trained tokens; the others are excluded from losses and denominators."""

    def of_top_entropy(self, entropy_N: Tensor, share: float) -> "Credit":
        """Set advantages to 0 except for the share of trained tokens with the highest entropy.

        The quantile is that of all trained tokens, interpolated (arXiv 2506.01939). Other tokens
        still count in the denominators of losses.
        """
        ordered = entropy_N[self.kept_N].double().sort().values
        if share == 1 or not len(ordered):
            return self
        at = (1 - share) * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        least = ordered[low] + (at - low) * (ordered[high] - ordered[low])
        return replace(self, advantages_N=self.advantages_N.masked_fill(entropy_N < least, 0.0))


def assign_credit(
    config: JobConfig,
    batch: TrainingBatch,
    old_N: Tensor | None,
    reference_N: Tensor | None,
    values: advantages.Values | None,
    own: Callable[[advantages.AdvantageInputs], Tensor] | None = None,
) -> Credit:
    """Compute the advantages of a batch, by the configuration's function or the user's `own`.

    `old_N` and `reference_N` are read if a KL enters the rewards; `values` are the critic's. A
    masked episode (`overlong_filter`) still counts in its group's mean and std, as in TRL, but not
    in statistics of the batch; the same holds for tokens that are too old. An episode whose game
    timed out (`env.on_step_timeout=mask`) is ignored, since its return is unknown; one that this
    leaves alone in its group is compared with nothing.
    """
    apart_S = batch.timed_out_S
    if config.env.on_step_timeout != "mask" or not bool(apart_S.any()):
        return _credit(config, batch, old_N, reference_N, values, own)
    samples = turns(batch) if config.algorithm.sample == "turn" else episodes(batch)
    rest_N = ~apart_S[batch.seq_N]
    credit = None
    if bool(rest_N.any()):
        rest = batch.of_sequences(~apart_S)
        group_E = episodes(rest).group_M
        size_E = torch.bincount(episodes(batch).group_M)[group_E]
        left_E = (torch.bincount(group_E)[group_E] == 1) & (size_E > 1)
        old_n, reference_n = (None if x is None else x[rest_N] for x in (old_N, reference_N))
        known = None if values is None else values.of(rest_N, ~apart_S)
        credit = _credit(config, rest, old_n, reference_n, known, own, left_E)
    return _spread(credit, batch, samples, values, rest_N, ~apart_S)


def _spread(
    credit: Credit | None,
    batch: TrainingBatch,
    samples: Samples,
    values: advantages.Values | None,
    rest_N: Tensor,
    rest_S: Tensor,
) -> Credit:
    """Return the credit of a whole batch from that of some sequences; the others have none."""
    whole, targets = episodes(batch), None
    rewards_E = sum_by_sequence(batch.token_rewards_N.double(), whole.sample_N, whole.num).float()
    advantages_N = torch.zeros_like(batch.behaviour_N)
    returns_N, kept_N = torch.zeros_like(advantages_N), torch.zeros_like(rest_N)
    kept_S = torch.zeros_like(rest_S)
    if credit is not None:
        rest_E = torch.zeros_like(rewards_E, dtype=torch.bool)
        rest_E[whole.sample_N[rest_N]] = True
        rewards_E[rest_E] = credit.rewards_E
        advantages_N[rest_N], kept_N[rest_N] = credit.advantages_N, credit.kept_N
        kept_S[rest_S] = credit.kept_S
        if credit.targets is not None:
            returns_N[rest_N] = credit.targets.returns_N
    if values is not None:
        targets = advantages.ValueTargets(values.values_N, returns_N, samples.sample_N, kept_N)
    return Credit(samples, rewards_E, advantages_N, targets, kept_S, kept_N)


def _credit(
    config: JobConfig,
    batch: TrainingBatch,
    old_N: Tensor | None,
    reference_N: Tensor | None,
    values: advantages.Values | None,
    own: Callable[[advantages.AdvantageInputs], Tensor] | None,
    left_E: Tensor | None = None,
) -> Credit:
    """Compute the credit of a batch; `left_E` (bool[E]) marks episodes that lost their peers."""
    algorithm = config.algorithm
    cut_S = batch.truncated_S
    kept_S = ~cut_S if algorithm.overlong_filter else torch.ones_like(cut_S)
    kept_N = kept_S[batch.seq_N]
    if batch.fresh_N is not None:
        kept_N = kept_N & batch.fresh_N
        kept_S = lengths_by_sequence(batch.seq_N[kept_N], batch.num_seqs) > 0
    by_turn = algorithm.sample == "turn"
    samples = turns(batch) if by_turn else episodes(batch)
    lone_M = samples.lone_M
    if left_E is not None:
        left_N = left_E[batch.episode_S[batch.seq_N]]
        left_M = torch.zeros_like(samples.group_M, dtype=torch.bool)
        left_M[samples.sample_N] = left_N
        lone_M = left_M if lone_M is None else lone_M | left_M
    earned_N = _rewards(config, batch, old_N, reference_N)
    rewards_N = earned_N
    if by_turn and algorithm.turn_reward == "return":
        rewards_N = returns_by_turn(batch, earned_N, algorithm.discount)
    values_N = None if values is None else values.values_N
    if values is not None and values.after_S is not None:
        rewards_N = _with_ends(rewards_N, values.after_S, batch.seq_N, algorithm.end_discount)
    inputs = advantages.AdvantageInputs(
        rewards_S=sum_by_sequence(rewards_N, samples.sample_N, samples.num).float(),
        group_S=samples.group_M,
        seq_N=samples.sample_N,
        token_rewards_N=rewards_N.float(),
        turn_N=batch.turn_N,
        state_N=answered_states(batch) if algorithm.advantage == "gigpo" else None,
        components_SC=batch.components_EC,
        baseline_S=batch.baseline_E,
        values_N=values_N,
        lone_S=lone_M,
        kept_N=kept_N,
        gamma=algorithm.token_discount,
    )
    compute = own or partial(advantages.compute_advantages, algorithm.advantage, **_options(config))
    advantages_N = _advantages(config, batch, inputs, compute)
    whole = episodes(batch)
    return Credit(
        samples,
        sum_by_sequence(earned_N, whole.sample_N, whole.num).float(),
        advantages_N.masked_fill(~kept_N, 0.0),
        None if values_N is None else _targets(config, batch, samples, inputs, kept_N),
        kept_S,
        kept_N,
    )


def _with_ends(rewards_N: Tensor, after_S: Tensor, seq_N: Tensor, gamma: float) -> Tensor:
    """Add the value at the end of each sequence to its last token."""
    last_N = is_last_of_sequence(seq_N)
    return rewards_N + gamma * after_S[seq_N] * last_N


def _advantages(
    config: JobConfig,
    batch: TrainingBatch,
    inputs: advantages.AdvantageInputs,
    compute: Callable[[advantages.AdvantageInputs], Tensor],
) -> Tensor:
    """Compare episodes, and branches with rewards of their own.

    `own`: tokens of such a branch have the branch's advantage, other tokens the episode's; `both`:
    tokens of the branch have the sum. Penalties on the tokens of a branch are subtracted from the
    branch's reward.
    """
    if batch.calls is None:
        return compute(inputs)
    assert inputs.token_rewards_N is not None
    further_N = inputs.token_rewards_N - batch.token_rewards_N
    inputs = _with_calls(inputs, batch, batch.calls)
    mode = config.algorithm.branch_credit
    branch_N = batch.calls.branch_K[batch.calls.call_N]
    if mode == "episode" or not bool((branch_N >= 0).any()):
        return compute(inputs)
    own = _with_calls(inputs, batch, batch.calls.own_chains())
    inside_N = branch_N >= 0
    further_N = further_N.masked_fill(~inside_N, 0.0)
    if mode == "both":
        advantages_N = compute(inputs)
    else:
        advantages_N = torch.zeros_like(batch.behaviour_N)
        rewards_S = own.rewards_S - sum_by_sequence(further_N, own.seq_N, own.num_seqs)
        outside = _of_tokens(replace(own, rewards_S=rewards_S), ~inside_N)
        advantages_N[~inside_N] = compute(outside)
    branches = _of_tokens(_by_branch(own, batch.calls, further_N), inside_N)
    advantages_N[inside_N] += compute(branches)
    return advantages_N


def _with_calls(
    inputs: advantages.AdvantageInputs, batch: TrainingBatch, calls: BatchCalls
) -> advantages.AdvantageInputs:
    """Compute advantages by turn and by token along chains of calls."""
    posted_N = batch.token_rewards_N
    further_N = inputs.token_rewards_N if inputs.token_rewards_N is not None else posted_N
    return replace(inputs, calls=calls, token_rewards_N=calls.token_rewards(further_N - posted_N))


def _by_branch(
    inputs: advantages.AdvantageInputs, calls: BatchCalls, further_N: Tensor
) -> advantages.AdvantageInputs:
    """Take each branch with a reward as one sequence; only for tokens in such branches.

    `further_N` is the reward of its tokens in addition to the posted reward, 0 for other tokens.
    """
    seq_N = calls.branch_K[calls.call_N].clamp(min=0)
    key_B, episode_B = calls.branch_key_B, calls.branch_episode_B
    size_B = torch.bincount(inputs.group_S)[inputs.group_S[episode_B]]
    is_only_B = advantages.peers_of(calls.branch_reward_B, key_B, episode_B).count == 1
    is_lone_B = is_only_B & (size_B > 1)
    if inputs.lone_S is not None:
        is_lone_B |= inputs.lone_S[episode_B]
    return replace(
        inputs,
        rewards_S=calls.branch_reward_B + sum_by_sequence(further_N, seq_N, len(key_B)),
        group_S=key_B,
        owner_S=episode_B,
        seq_N=seq_N,
        lone_S=is_lone_B,
    )


def _of_tokens(inputs: advantages.AdvantageInputs, kept_N: Tensor) -> advantages.AdvantageInputs:
    """Return the inputs of the advantages of some of the tokens."""
    names = ("seq_N", "token_rewards_N", "turn_N", "state_N", "values_N", "kept_N")
    values_by_name = {name: getattr(inputs, name) for name in names}
    arrays: dict[str, Any] = {
        name: None if value is None else value[kept_N] for name, value in values_by_name.items()
    }
    calls = inputs.calls
    return replace(inputs, **arrays, calls=None if calls is None else calls.of_tokens(kept_N))


def _options(config: JobConfig) -> dict[str, Any]:
    algorithm = config.algorithm
    if algorithm.advantage == "gae":
        return {
            "gae_lambda": algorithm.gae_lambda,
            "by_length": algorithm.gae_lambda_length,
            "turn_gamma": algorithm.turn_gamma,
            "turn_lambda": algorithm.turn_lambda,
        }
    if algorithm.advantage == "grpo":
        return {"std": algorithm.advantage_std}
    if algorithm.advantage == "gdpo":
        return {"weights": list(algorithm.reward_components.values())}
    if algorithm.advantage == "gigpo":
        return {"step_weight": algorithm.step_weight, "std": algorithm.advantage_std}
    return {}


def _rewards(
    config: JobConfig, batch: TrainingBatch, old_N: Tensor | None, reference_N: Tensor | None
) -> Tensor:
    """Return the reward of each token with configured bonuses and penalties: float64[N].

    In float64, sums do not depend on their order, so that equal episodes have equal returns.
    """
    algorithm = config.algorithm
    rewards_N = batch.token_rewards_N.double()
    whole = episodes(batch)
    last_N, lengths_E = is_last_of_sequence(whole.sample_N), whole.lengths_M
    seq_E = batch.seq_N[last_N]
    if algorithm.overlong_buffer:
        rewards_N[last_N] += advantages.overlong_penalty(
            lengths_E,
            config.rollout.response_limit,
            algorithm.overlong_buffer,
            algorithm.overlong_factor,
            batch.truncated_S[seq_E],
        )
    if algorithm.length_coef:
        solved_E = batch.rewards_S[seq_E] > config.evaluation.success_reward
        rewards_N[last_N] += advantages.length_reward(
            lengths_E, whole.group_M, solved_E, algorithm.length_coef
        )
    if old_N is not None and reference_N is not None and algorithm.kl_in == "reward":
        rewards_N = rewards_with_kl(
            algorithm.kl_estimator, rewards_N, old_N, reference_N, algorithm.kl_coef
        )
    return rewards_N


def _targets(
    config: JobConfig,
    batch: TrainingBatch,
    samples: Samples,
    inputs: advantages.AdvantageInputs,
    kept_N: Tensor,
) -> advantages.ValueTargets:
    algorithm = config.algorithm
    values_N, rewards_N = inputs.values_N, inputs.token_rewards_N
    assert values_N is not None
    assert rewards_N is not None
    gamma, own = algorithm.token_discount, config.critic.gae_lambda
    gae_lambda = algorithm.gae_lambda if own is None else own
    if batch.calls is None:
        between = (samples.sample_N, batch.turn_N)
        advantages_N = advantages.generalized_advantage(
            rewards_N,
            values_N,
            samples.sample_N,
            samples.num,
            advantages.between_tokens(gamma, algorithm.turn_gamma, *between),
            advantages.between_tokens(
                gae_lambda, algorithm.turn_lambda if own is None else None, *between
            ),
        )
    else:
        is_own = algorithm.branch_credit == "own"
        calls = batch.calls.own_chains() if is_own else batch.calls
        by_call = _with_calls(inputs, batch, calls)
        assert by_call.token_rewards_N is not None
        advantages_N = advantages.advantage_over_chains(
            by_call.token_rewards_N, values_N, calls, gamma, gae_lambda
        )
    return advantages.ValueTargets(
        values_N, (advantages_N + values_N).float(), samples.sample_N, kept_N
    )
