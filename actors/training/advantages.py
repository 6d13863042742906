"""Advantages: compute a weight for each generated token from rewards.

Every function takes the whole batch, since groups and whitening need all of it. They compute in
float64 and return float32. A sequence is the unit of rewards: an episode, or one of its turns
(`batch.py`). A group whose rewards are all equal gets exactly 0. A group of one has no baseline:
mean 0, std 1.

Values of a critic: V_t is the value before token t is generated. The arrays have no observation
tokens, so the value after a turn's last token is the value before the next turn's first token.

Shape letters: N generated tokens, S sequences, P places (tokens of a sequence, or its turns), K
turns, C components of the reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ...schemas.wire.errors import ConfigError
from .batch import BatchCalls
from .sequences import by_sequence, choose, is_last_of_sequence, lengths_by_sequence, reward_to_go


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of the advantage functions; the first three are always required."""

    rewards_S: Tensor
    """Outcome reward: the return of each episode."""
    group_S: Tensor
    """int64: the task group of each sequence."""
    seq_N: Tensor
    """int64: the sequence of each generated token."""
    token_rewards_N: Tensor | None = None
    """Reward of each token, a turn's reward on its last token; default: `rewards_S` on the last
    token."""
    turn_N: Tensor | None = None
    """int64: the turn of each token within its sequence, from 0; needed by grpo_per_turn and
    gigpo."""
    state_N: Tensor | None = None
    """int64: the observation that the token's turn answers; equal observations have equal ids;
    gigpo."""
    components_SC: Tensor | None = None
    """Rewards of each sequence by component; needed by gdpo."""
    baseline_S: Tensor | None = None
    """Reward of the greedy episode of the same task; needed by remax."""
    values_N: Tensor | None = None
    """The critic's value before each token; needed by gae."""
    lone_S: Tensor | None = None
    """bool: sequences without another sequence of their task to compare with. Functions that
    compare within a group give them 0 and leave them out of statistics of the batch."""
    owner_S: Tensor | None = None
    """int64: the episode of each sequence, if an episode may have several with equal `group_S`."""
    calls: BatchCalls | None = None
    """The calls of agents' episodes, in place of consecutive turns."""
    kept_N: Tensor | None = None
    """bool: trained tokens (default: all); statistics of the batch are over these."""
    gamma: float = 1.0
    """Discount: per token in reinforce_pp and gae, per turn in grpo_per_turn and gigpo."""

    @property
    def num_seqs(self) -> int:
        """Number of sequences, including sequences without generated tokens."""
        return len(self.rewards_S)


# -- statistics of peers ---------------------------------------------------------------------------
# Peers have the same key. If elements belong to episodes, an episode counts once for each key:
# its elements with that key share its weight equally.


@dataclass(frozen=True)
class Peers:
    """Statistics of the peers of each element, broadcast back to the elements."""

    count: Tensor
    """Number of elements with its key, or of episodes if elements belong to episodes."""
    mean: Tensor
    std: Tensor
    mine: Tensor
    """The mean of its own episode; without episodes, the element itself."""


def peers_of(values: Tensor, key: Tensor, owner: Tensor | None = None) -> Peers:
    """Return statistics over the values with the same key; `owner` is the episode of each value.

    If all values are equal, the mean is that value itself: the deviation is exactly 0, not a
    rounding error that a division by a tiny std would amplify.
    """
    num_keys = int(key.max()) + 1 if len(key) else 0
    zeros = values.new_zeros(num_keys)
    if owner is None:
        count = torch.bincount(key, minlength=num_keys)
        mean = zeros.index_add(0, key, values) / count.clamp(min=1)
        squares = zeros.index_add(0, key, (values - mean[key]) ** 2)
        mine = values
    else:
        count, mean, squares, mine = _by_owner(values, key, owner, num_keys)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, key, values, reduce="amin", include_self=False)[key]
    highest = zeros.scatter_reduce(0, key, values, reduce="amax", include_self=False)[key]
    equal, alone = lowest == highest, (count == 1)[key]
    mean = torch.where(equal, values, mean[key]).masked_fill(alone, 0.0)
    std = std[key].masked_fill(equal, 0.0).masked_fill(alone, 1.0)
    return Peers(count[key], mean, std, mine)


def _by_owner(
    values: Tensor, key: Tensor, owner: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squares of each key, and the mean of each value's episode."""
    num_owners = int(owner.max()) + 1 if len(owner) else 0
    pair: Any = key * num_owners + owner  # torch leaves `unique` untyped
    pairs, of_pair = cast("tuple[Tensor, Tensor]", pair.unique(return_inverse=True))
    in_pair = torch.bincount(of_pair, minlength=len(pairs))
    key_of_pair = torch.div(pairs, max(num_owners, 1), rounding_mode="floor")
    zeros = values.new_zeros(num_keys)
    means = values.new_zeros(len(pairs)).index_add(0, of_pair, values) / in_pair
    count = torch.bincount(key_of_pair, minlength=num_keys)
    mean = zeros.index_add(0, key_of_pair, means) / count.clamp(min=1)
    deviations = (values - mean[key]) ** 2 / in_pair[of_pair]
    return count, mean, zeros.index_add(0, key, deviations), means[of_pair]


# -- values of a critic ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """A critic's values of a batch before a step."""

    values_N: Tensor
    """Value before each token."""
    after_S: Tensor | None = None
    """Value at the end of each sequence whose game would have continued, else 0; None: 0 for
    all."""

    def of(self, chosen_N: Tensor, chosen_S: Tensor) -> "Values":
        """Return the values of some sequences and their tokens."""
        after_S = None if self.after_S is None else self.after_S[chosen_S]
        return Values(self.values_N[chosen_N], after_S)


@dataclass(frozen=True)
class ValueTargets:
    """Inputs of a critic's updates in one step, over the whole batch."""

    values_N: Tensor
    """The critic's values before the step."""
    returns_N: Tensor
    """The returns that the critic is trained towards."""
    sample_N: Tensor
    """int64: the sample of each token (`batch.py`)."""
    kept_N: Tensor
    """bool: tokens that the critic is trained on."""


def generalized_advantage(
    rewards_N: Tensor,
    values_N: Tensor,
    seq_N: Tensor,
    num_seqs: int,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> Tensor:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t: float64[N] (arXiv 1506.02438).

    `gamma` and `lam` may be float64[N]: the factors between each token and the next. No value
    follows the last token of a sequence. `advantage + value` is the return that the critic is
    trained towards.
    """
    rewards_SP, place_N = by_sequence(rewards_N.double(), seq_N, num_seqs)
    values_SP, _ = by_sequence(values_N.double(), seq_N, num_seqs)
    gamma_SP, lam_SP = (_laid_out(factor, seq_N, num_seqs) for factor in (gamma, lam))
    delta_SP = rewards_SP - values_SP
    delta_SP[:, :-1] += (gamma_SP * values_SP.roll(-1, 1))[:, :-1]
    return reward_to_go(delta_SP, gamma_SP * lam_SP)[seq_N, place_N]


def _laid_out(value: float | Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """Lay the numbers out as float64[S, P]; a single number is returned as it is."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device=seq_N.device)
    return by_sequence(value.double(), seq_N, num_seqs)[0]


def between_tokens(
    within: float, turns: float | None, seq_N: Tensor, turn_N: Tensor | None
) -> float | Tensor:
    """Return γ or λ between each token and the next: float64[N] if turns have their own factor."""
    if turns is None or turn_N is None:
        return within
    ends_N = is_last_of_sequence(seq_N)
    ends_N[:-1] |= turn_N[1:] != turn_N[:-1]
    ours_N = torch.full_like(ends_N, within, dtype=torch.float64)
    return ours_N.masked_fill(ends_N, turns)


def advantage_over_chains(
    rewards_N: Tensor, values_N: Tensor, calls: BatchCalls, gamma: float, lam: float
) -> Tensor:
    """Return the generalized advantage over the chains of calls of agents' episodes: float64[N]."""
    values_N = values_N.double()
    delta_N = rewards_N.double() + gamma * calls.next_values(values_N) - values_N
    return calls.to_go(delta_N, gamma * lam)


def value_loss(
    values_N: Tensor, before_N: Tensor, returns_N: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (clip(V, V_old ± ε) − R)²) of each token; mark clipped tokens.

    The clip keeps an update near the values from which the advantages were computed (the value clip
    of PPO's first implementation).
    """
    plain_N = (values_N - returns_N) ** 2
    bounded_N = (values_N.clamp(before_N - clip, before_N + clip) - returns_N) ** 2
    return torch.maximum(plain_N, bounded_N) / 2, bounded_N > plain_N


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 a constant one; 0 for equal returns."""
    if not len(returns_N):
        return 0.0
    variance = float(returns_N.double().var(correction=0))
    if variance == 0:
        return 0.0
    return 1 - float((returns_N.double() - values_N.double()).var(correction=0)) / variance


AdvantageFn = Callable[..., Tensor]
_EPSILON = 1e-6
"""The ε that is added to stds and means."""
_WHITEN_EPSILON = 1e-8
"""The ε that is added to the variance of a batch."""


def _groups(inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Peers]:
    rewards_S = inputs.rewards_S.double()
    group_S: Any = inputs.group_S  # torch leaves `unique` untyped
    key_S: Tensor = group_S.unique(return_inverse=True)[1]
    peers = peers_of(rewards_S, key_S, inputs.owner_S)
    if inputs.lone_S is not None:
        peers = replace(peers, mean=torch.where(inputs.lone_S, rewards_S, peers.mean))
    return rewards_S, key_S, peers


def _counted(inputs: AdvantageInputs) -> Tensor:
    """Return which sequences count in statistics of the batch: bool[S].

    These are the ones that are trained, and those without tokens of their own.
    """
    counted_S = torch.ones_like(inputs.group_S, dtype=torch.bool)
    if inputs.kept_N is not None:
        tokens_S = lengths_by_sequence(inputs.seq_N, inputs.num_seqs)
        kept_S = lengths_by_sequence(inputs.seq_N[inputs.kept_N], inputs.num_seqs)
        counted_S = (kept_S > 0) | (tokens_S == 0)
    return counted_S if inputs.lone_S is None else counted_S & ~inputs.lone_S


def _lone(inputs: AdvantageInputs, seq: Tensor) -> Tensor:
    """Return whether these sequences have no others to compare with."""
    return torch.zeros_like(seq, dtype=torch.bool) if inputs.lone_S is None else inputs.lone_S[seq]


def _to_tokens(advantages_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    return advantages_S[inputs.seq_N].float()


def _token_rewards(inputs: AdvantageInputs) -> Tensor:
    if inputs.token_rewards_N is not None:
        return inputs.token_rewards_N.double()
    outcome_N = inputs.rewards_S.double()[inputs.seq_N]
    return outcome_N * is_last_of_sequence(inputs.seq_N)


def _whiten(values_N: Tensor, kept_N: Tensor | None) -> Tensor:
    kept_n = values_N if kept_N is None else values_N[kept_N]
    if not len(kept_n) or kept_n.min() == kept_n.max():
        return torch.zeros_like(values_N)
    return (values_N - kept_n.mean()) * torch.rsqrt(kept_n.var() + _WHITEN_EPSILON)


def grpo(
    inputs: AdvantageInputs,
    *,
    std: Literal["group", "batch", "none"] = "group",
) -> Tensor:
    """(R − mean) / (std + ε) in the group, unbiased std (DeepSeekMath, arXiv 2402.03300).

    With std=batch the std is that of all trained rewards of the batch, so that easy and hard tasks
    weigh the same (arXiv 2508.08221); with std=none there is no division.
    """
    rewards_S, key_S, peers = _groups(inputs)
    if std == "none":
        return _to_tokens(rewards_S - peers.mean, inputs)
    of_episodes = _by_episode(inputs, key_S, peers)
    if std == "group" or len(of_episodes) < 2:
        return _to_tokens((rewards_S - peers.mean) / (peers.std + _EPSILON), inputs)
    return _to_tokens((rewards_S - peers.mean) / (of_episodes.std() + _EPSILON), inputs)


def _by_episode(inputs: AdvantageInputs, key_S: Tensor, peers: Peers) -> Tensor:
    """Return one reward for each trained episode: the mean over its sequences."""
    counted_S = _counted(inputs)
    if inputs.owner_S is None:
        return peers.mine[counted_S]
    pair_S: Any = (key_S * (int(inputs.owner_S.max()) + 1) + inputs.owner_S)[counted_S]
    pairs, of_pair_s = pair_S.unique(return_inverse=True)
    return peers.mine.new_zeros(len(pairs)).index_put((of_pair_s,), peers.mine[counted_S])


def gdpo(inputs: AdvantageInputs, *, weights: Sequence[float] = (1.0,)) -> Tensor:
    """Σ_c w_c (R_c − mean) / (std + ε) in the group, whitened over the batch (arXiv 2601.05242).

    Each of the C components is normalised separately, so that components with small and large
    variance count the same.
    """
    if inputs.components_SC is None:
        raise ConfigError(
            "advantage=gdpo got no components",
            hint="set algorithm.reward_components, or choose advantage=grpo",
        )
    _, key_S, _ = _groups(inputs)
    total_S = inputs.rewards_S.new_zeros(inputs.num_seqs, dtype=torch.float64)
    for component_S, weight in zip(inputs.components_SC.double().T, weights, strict=True):
        peers = peers_of(component_S, key_S)
        mean_S = peers.mean
        if inputs.lone_S is not None:
            mean_S = torch.where(inputs.lone_S, component_S, mean_S)
        total_S += weight * (component_S - mean_S) / (peers.std + _EPSILON)
    counted_s = total_S[_counted(inputs)]
    if len(counted_s) > 1:
        total_S = (total_S - counted_s.mean()) / (counted_s.std() + _EPSILON)
    return _to_tokens(total_S, inputs).masked_fill(_lone(inputs, inputs.seq_N), 0.0)


def gpg(inputs: AdvantageInputs) -> Tensor:
    """α (R − mean), α = episodes / episodes with a reward other than 0 (GPG, arXiv 2504.02546)."""
    rewards_S, key_S, peers = _groups(inputs)
    of_episodes = _by_episode(inputs, key_S, peers)
    scale = len(of_episodes) / max(int((of_episodes != 0).sum()), 1)
    return _to_tokens(scale * (rewards_S - peers.mean), inputs)


def passk(inputs: AdvantageInputs) -> Tensor:
    """The best reward of a group minus its second best, over the std (arXiv 2503.19595).

    All other episodes get 0, and so does the best one in a tie: this trains the group's maximum.
    """
    rewards_S, key_S, peers = _groups(inputs)
    owner_S = torch.arange(len(rewards_S)) if inputs.owner_S is None else inputs.owner_S
    owner_S = owner_S.to(rewards_S.device)
    advantages_S = torch.zeros_like(rewards_S)
    for key in range(int(key_S.max()) + 1 if len(key_S) else 0):
        here = key_S == key
        best = int(torch.where(here, rewards_S, -torch.inf).argmax())
        of_best = here & (owner_S == owner_S[best])
        if bool((here & ~of_best).any()):
            lead = rewards_S[best] - rewards_S[here & ~of_best].max()
            advantages_S[of_best] = lead.clamp(min=0) / (peers.std[best] + _EPSILON)
    return _to_tokens(advantages_S, inputs)


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """R − mean, without the std, which overweights easy and hard tasks (arXiv 2503.20783).

    Its loss is summed and divided by a constant length: `loss_agg=seq-mean-token-sum-norm`.
    """
    rewards_S, _, peers = _groups(inputs)
    return _to_tokens(rewards_S - peers.mean, inputs)


def rloo(inputs: AdvantageInputs) -> Tensor:
    """G/(G−1) · (R − mean): each episode against the mean of the others (arXiv 2402.14740)."""
    rewards_S, _, peers = _groups(inputs)
    scale_S = torch.where(peers.count > 1, peers.count / (peers.count - 1).clamp(min=1), 1.0)
    among_S = rewards_S - peers.mine  # those of one episode
    return _to_tokens(among_S + scale_S * (peers.mine - peers.mean), inputs)


def reinforce_pp(inputs: AdvantageInputs) -> Tensor:
    """Discounted reward-to-go per token, whitened over the batch (arXiv 2501.03262)."""
    if inputs.calls is not None:
        returns_N = inputs.calls.to_go(_token_rewards(inputs), inputs.gamma)
        return _whiten(returns_N, inputs.kept_N).float()
    rewards_SP, place_N = by_sequence(_token_rewards(inputs), inputs.seq_N, inputs.num_seqs)
    returns_SP = reward_to_go(rewards_SP, inputs.gamma)
    return _whiten(returns_SP[inputs.seq_N, place_N], inputs.kept_N).float()


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Tensor:
    """R − group mean, whitened over the batch's tokens (arXiv 2501.03262)."""
    rewards_S, _, peers = _groups(inputs)
    lone_N = _lone(inputs, inputs.seq_N)
    counted_N = ~lone_N if inputs.kept_N is None else inputs.kept_N & ~lone_N
    advantages_N = _whiten((rewards_S - peers.mean)[inputs.seq_N], counted_N)
    return advantages_N.masked_fill(lone_N, 0.0).float()


def remax(inputs: AdvantageInputs) -> Tensor:
    """R − R(greedy episode of the same task) (arXiv 2310.10505)."""
    if inputs.baseline_S is None:
        raise ConfigError(
            "advantage=remax got no greedy baseline",
            hint="run one greedy episode per task, or choose advantage=grpo",
        )
    return _to_tokens(inputs.rewards_S.double() - inputs.baseline_S.double(), inputs)


def opo(inputs: AdvantageInputs) -> Tensor:
    """R − Σ len·R / Σ len: the length-weighted baseline (arXiv 2505.23585)."""
    rewards_S, key_S, peers = _groups(inputs)
    lengths_S = lengths_by_sequence(inputs.seq_N, inputs.num_seqs).double()
    zeros = rewards_S.new_zeros(len(rewards_S))
    weighted = zeros.index_add(0, key_S, lengths_S * rewards_S)
    total = zeros.index_add(0, key_S, lengths_S)
    baseline_S = (weighted / total.clamp(min=1.0))[key_S]
    equal_or_alone_S = (peers.std == 0) | (peers.count == 1)
    return _to_tokens(rewards_S - torch.where(equal_or_alone_S, peers.mean, baseline_S), inputs)


def maxrl(inputs: AdvantageInputs) -> Tensor:
    """(R − mean) / (mean + ε): hard tasks weigh more. Rewards must be at least 0."""
    rewards_S, _, peers = _groups(inputs)
    counted_s = rewards_S[_counted(inputs)]
    if len(counted_s) and counted_s.min() < 0:
        raise ConfigError(
            f"advantage=maxrl divides by the group's mean reward; a reward is "
            f"{float(counted_s.min()):g}",
            hint="give rewards of at least 0, or choose advantage=grpo",
        )
    scale_S = torch.where(peers.count > 1, peers.mean + _EPSILON, 1.0)
    return _to_tokens((rewards_S - peers.mean) / scale_S, inputs)


@dataclass(frozen=True)
class _Turns:
    """The played turns of all sequences."""

    returns_K: Tensor
    """R_t = r_t + γ R_{t+1}."""
    seq_K: Tensor
    turn_K: Tensor
    of_token_N: Tensor
    """The turn of each token, as an index into the other arrays."""
    num_turns: int


def _turns(inputs: AdvantageInputs, name: str) -> _Turns:
    if inputs.turn_N is None:
        raise ConfigError(
            f"advantage={name} got no turns", hint="pass turn_N, or choose advantage=grpo"
        )
    seq_N, turn_N = inputs.seq_N, inputs.turn_N
    num_turns = int(turn_N.max()) + 1 if len(turn_N) else 0
    rewards_SP = inputs.rewards_S.new_zeros(inputs.num_seqs, num_turns, dtype=torch.float64)
    rewards_SP.index_put_((seq_N, turn_N), _token_rewards(inputs), accumulate=True)
    returns_SP = reward_to_go(rewards_SP, inputs.gamma)
    place_N: Any = seq_N * num_turns + turn_N  # torch leaves `unique` untyped
    place_K, of_token_N = place_N.unique(return_inverse=True)
    return _Turns(
        returns_SP.flatten()[place_K],
        place_K // max(num_turns, 1),
        place_K % max(num_turns, 1),
        of_token_N,
        num_turns,
    )


def _call_turns(inputs: AdvantageInputs, calls: BatchCalls) -> _Turns:
    returns_K = calls.returns_by_call(_token_rewards(inputs), inputs.gamma)
    depth_K = torch.zeros_like(calls.next_K)
    return _Turns(returns_K, calls.episode_K, depth_K, calls.call_N, 1)


def grpo_per_turn(inputs: AdvantageInputs) -> Tensor:
    """R_t = r_t + γ R_{t+1} per turn, normalised among the group's episodes at the same turn.

    A turn reached by only one episode of its group gets 0.
    """
    if inputs.calls is not None:
        return _per_call(inputs, inputs.calls)
    turns = _turns(inputs, "grpo_per_turn")
    _, key_S, group = _groups(inputs)
    peers = peers_of(turns.returns_K, key_S[turns.seq_K] * turns.num_turns + turns.turn_K)
    normalised_K = (turns.returns_K - peers.mean) / (peers.std + _EPSILON)
    lonely_K = (peers.count == 1) & (group.count[turns.seq_K] > 1) | _lone(inputs, turns.seq_K)
    return normalised_K.masked_fill(lonely_K, 0.0)[turns.of_token_N].float()


def grpo_per_step(inputs: AdvantageInputs) -> Tensor:
    """R_t = r_t + γ R_{t+1} per turn, minus the mean of the first returns R_0, over their std.

    OpenTinker's estimator of that name, after GTPO (arXiv 2511.17052), except that a group with
    equal first returns gets 0 instead of a division by a std of 0.
    """
    turns = _turns(inputs, "grpo_per_step")
    _, key_S, _ = _groups(inputs)
    first_K = turns.turn_K == 0
    seq_F = turns.seq_K[first_K]
    peers = peers_of(turns.returns_K[first_K], key_S[seq_F])
    mean_S = turns.returns_K.new_zeros(inputs.num_seqs).index_put((seq_F,), peers.mean)
    std_S = torch.ones_like(mean_S).index_put((seq_F,), peers.std)
    normalised_K = (turns.returns_K - mean_S[turns.seq_K]) / (std_S[turns.seq_K] + _EPSILON)
    equal_K = (std_S == 0)[turns.seq_K] | _lone(inputs, turns.seq_K)
    return normalised_K.masked_fill(equal_K, 0.0)[turns.of_token_N].float()


def _per_call(inputs: AdvantageInputs, calls: BatchCalls) -> Tensor:
    """Return R_c = r_c + γ R of the next call, normalised among calls with the same key."""
    returns_K = calls.returns_by_call(_token_rewards(inputs), inputs.gamma)
    peers = peers_of(returns_K, calls.key_K, calls.episode_K)
    normalised_K = (returns_K - peers.mean) / (peers.std + _EPSILON)
    lonely_K = (peers.count == 1) & (calls.group_size_K > 1)
    return normalised_K.masked_fill(lonely_K, 0.0)[calls.call_N].float()


def gigpo(
    inputs: AdvantageInputs,
    *,
    step_weight: float = 1.0,
    std: Literal["group", "none"] = "group",
) -> Tensor:
    """A_E + ω A_S: advantage of the episode in its group, and of the turn at its observation.

    A_E is that of grpo. A_S normalises R_t = r_t + γ R_{t+1} among the group's turns that answer an
    equal observation; a turn with a unique observation gets 0 (arXiv 2505.10978). std=none is
    F_norm = 1: both are deviations from means, without division.
    """
    turns = _turns(inputs, "gigpo") if inputs.calls is None else _call_turns(inputs, inputs.calls)
    if inputs.state_N is None:
        raise ConfigError(
            "advantage=gigpo got no observations", hint="pass state_N, or choose advantage=grpo"
        )
    _, key_S, _ = _groups(inputs)
    group_K = key_S[turns.seq_K] if inputs.calls is None else inputs.calls.group_K
    state_K = torch.zeros_like(turns.seq_K)
    state_K[turns.of_token_N] = inputs.state_N
    num_states = int(state_K.max()) + 1 if len(state_K) else 0
    peers = peers_of(turns.returns_K, group_K * num_states + state_K)
    scale_K = 1.0 if std == "none" else peers.std + _EPSILON
    normalised_K = (turns.returns_K - peers.mean) / scale_K
    step_N = normalised_K.masked_fill(peers.count == 1, 0.0)[turns.of_token_N]
    return grpo(inputs, std=std) + step_weight * step_N.float()


def gae(
    inputs: AdvantageInputs,
    *,
    gae_lambda: float = 1.0,
    by_length: float | None = None,
    turn_gamma: float | None = None,
    turn_lambda: float | None = None,
) -> Tensor:
    """Generalised advantage over the generated tokens, whitened over the batch (PPO).

    With `by_length` α, λ of a sequence of l tokens is 1 − 1/(αl), at least 0 (VAPO, arXiv
    2504.05118). `turn_gamma` and `turn_lambda` apply between a turn's last token and
    the next token.
    """
    if inputs.values_N is None:
        raise ConfigError(
            "advantage=gae got no values", hint="train a critic, or choose advantage=grpo"
        )
    rewards_N, values_N = _token_rewards(inputs), inputs.values_N
    if inputs.calls is not None:
        if by_length is not None:
            raise ConfigError(
                "algorithm.gae_lambda_length is not built for the calls of agent programs",
                hint="set algorithm.gae_lambda",
            )
        advantages_N = advantage_over_chains(
            rewards_N, values_N, inputs.calls, inputs.gamma, gae_lambda
        )
        return _whiten(advantages_N, inputs.kept_N).float()
    between = (inputs.seq_N, inputs.turn_N)
    gamma = between_tokens(inputs.gamma, turn_gamma, *between)
    lam = between_tokens(gae_lambda, turn_lambda, *between)
    if by_length is not None:
        lengths_S = lengths_by_sequence(inputs.seq_N, inputs.num_seqs).double()
        lam = (1 - 1 / (by_length * lengths_S.clamp(min=1))).clamp(min=0)[inputs.seq_N]
    advantages_N = generalized_advantage(
        rewards_N, values_N, inputs.seq_N, inputs.num_seqs, gamma, lam
    )
    return _whiten(advantages_N, inputs.kept_N).float()


ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "dr_grpo": dr_grpo,
    "gpg": gpg,
    "passk": passk,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "maxrl": maxrl,
    "grpo_per_turn": grpo_per_turn,
    "grpo_per_step": grpo_per_step,
    "gigpo": gigpo,
    "gae": gae,
}


def compute_advantages(name: str, inputs: AdvantageInputs, **options: Any) -> Tensor:
    """Compute the advantage of each generated token: float32[N].

    `options` are the keyword arguments of the function called `name`.
    """
    return choose(ADVANTAGES, "advantage", name)(inputs, **options)


# -- shaping of rewards by length ------------------------------------------------------------------
# The length of an episode is the number of tokens that the policy generated in it, in all its rows;
# observations and the outputs of tools do not count.


def overlong_penalty(
    lengths_E: Tensor,
    max_len: int,
    buffer: int,
    factor: float = 1.0,
    cut_E: Tensor | None = None,
) -> Tensor:
    """Return the soft penalty of DAPO for lengths in the last `buffer` tokens: float32[E], ≤ 0.

    −(len − (max_len − buffer)) / buffer · factor, from −factor to 0, arXiv 2503.14476; the full
    penalty for an episode truncated by a limit (bool[E]), even if it has fewer than `max_len`
    tokens.
    """
    if not 0 < buffer <= max_len:
        raise ConfigError(
            f"overlong_buffer is {buffer}, the longest response has {max_len} tokens",
            hint=f"set algorithm.overlong_buffer between 1 and {max_len}",
        )
    excess_E = lengths_E.float() - (max_len - buffer)
    penalty_E = (-excess_E / buffer * factor).clamp(-factor, 0.0)
    return penalty_E if cut_E is None else penalty_E.masked_fill(cut_E, -factor)


def length_reward(
    lengths_E: Tensor, group_E: Tensor, solved_E: Tensor, coef: float = 1.0
) -> Tensor:
    """Reward short episodes within their group: float32[S] (Kimi k1.5, arXiv 2501.12599 §2.3.3).

    λ = ½ − (len − shortest) / (longest − shortest), at most 0 for an unsolved episode; 0 in a group
    of episodes of equal length.
    """
    lengths_E = lengths_E.double()
    bounds = lengths_E.new_zeros(int(group_E.max()) + 1)
    shortest_E, longest_E = (
        bounds.scatter_reduce(0, group_E, lengths_E, reduce=reduce, include_self=False)[group_E]
        for reduce in ("amin", "amax")
    )
    share_E = (lengths_E - shortest_E) / (longest_E - shortest_E).clamp(min=1)
    lambda_E = torch.where(longest_E > shortest_E, 0.5 - share_E, 0.0)
    return (coef * torch.where(solved_E, lambda_E, lambda_E.clamp(max=0.0))).float()
