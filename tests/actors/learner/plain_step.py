"""The training step written plainly: padded rows, one loop over episodes, formulas as in papers.

It shares nothing with the learner but the model and the configuration, and is what the packed
step is compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Trajectory
from torch import Tensor, nn

Tokens = list[Tensor]
"""One tensor for each episode: its generated tokens."""


@dataclass
class Episodes:
    """What the plain step reads."""

    trajectories: list[Trajectory]
    group: list[int]
    behaviour: Tokens
    lags: Tokens
    advantages: Tokens


def plain_logprobs(
    model: nn.Module, trajectories: list[Trajectory], temperature: float
) -> tuple[Tokens, Tokens]:
    """Return log-probs and entropies of the generated tokens, by one padded forward pass."""
    longest = max(len(item.mask) for item in trajectories)
    ids = torch.zeros(len(trajectories), longest, dtype=torch.int64)
    real = torch.zeros(len(trajectories), longest, dtype=torch.int64)
    for row, item in enumerate(trajectories):
        ids[row, : len(item.mask)] = torch.from_numpy(item.token_ids.astype(np.int64))
        real[row, : len(item.mask)] = 1
    logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits / temperature
    logprobs = logits.log_softmax(-1)
    picked, entropies = [], []
    for row, item in enumerate(trajectories):
        at = torch.from_numpy(np.flatnonzero(item.mask))
        picked.append(logprobs[row, at - 1, ids[row, at]])
        entropies.append(-(logprobs[row, at - 1].exp() * logprobs[row, at - 1]).sum(-1))
    return picked, entropies


def grpo(groups: list[list[float]]) -> list[float]:
    """(R − mean) / (std + 1e-6) within each group."""
    result: list[float] = []
    for rewards in groups:
        mean, std = float(np.mean(rewards)), float(np.std(rewards, ddof=1))
        result += [(reward - mean) / (std + 1e-6) if std else 0.0 for reward in rewards]
    return result


def correction(
    config: JobConfig, current: Tokens, old: Tokens, data: Episodes, kept: Tokens
) -> tuple[Tokens, Tokens]:
    """Return the weight of each token, and the log-probs around which the loss clips."""
    algorithm = config.algorithm
    weights, clip_around = [], []
    for index, (now, before) in enumerate(zip(current, old, strict=True)):
        behaviour, lag = data.behaviour[index], data.lags[index]
        w = (before - behaviour).exp()
        around = before
        match algorithm.correction:
            case "none":
                weight = torch.ones_like(w)
            case "tis" if algorithm.correction_level == "sequence":
                weight = torch.full_like(w, min(float(w.prod()), 2.0))
            case "tis":
                weight = torch.minimum(w, torch.tensor(2.0))
            case "icepop":
                weight = w * ((w >= 0.5) & (w <= 5.0))
            case "geometric":
                weight = torch.full_like(w, 0.99 <= float(w.log().mean().exp()) <= 1.01)
            case "mis":
                weight = torch.full_like(w, float(w.prod()) <= 3.0)
            case "veto":
                weight = torch.full_like(w, bool((w >= 1e-4).all()))
            case "decoupled" if algorithm.proximal == "loglinear":
                around = behaviour + lag / (lag + 1) * (now.detach() - behaviour)
                weight = (around - behaviour).exp()
            case "decoupled":
                weight = w
            case "m2po":
                weight = kept[index]
        weights.append(weight.detach())
        clip_around.append(around.detach())
    return weights, clip_around


def m2po_kept(old: Tokens, behaviour: Tokens) -> Tokens:
    """Drop the largest squared log-ratios until the mean of the rest is under 0.04."""
    squares = torch.cat([(o - b).double() ** 2 for o, b in zip(old, behaviour, strict=True)])
    kept = torch.ones_like(squares, dtype=torch.bool)
    while kept.any() and squares[kept].mean() >= 0.04:
        kept[int(torch.where(kept, squares, -1.0).argmax())] = False
    return list(kept.float().split([len(item) for item in old]))


def policy_loss(config: JobConfig, now: Tensor, around: Tensor, data: Episodes, at: int) -> Tensor:
    """Return the loss of each token of one episode."""
    algorithm, a, behaviour = config.algorithm, data.advantages[at], data.behaviour[at]
    ratio = (now - around).exp()

    def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
        return torch.max(-a * ratio, -a * torch.clamp(ratio, 1 - low, 1 + high))

    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "ppo":
            loss = clipped(ratio, low or 0.2, high or 0.2)
            return torch.where(a < 0, torch.min(loss, -algorithm.dual_clip * a), loss)
        case "gspo":
            sequence = (now - around).mean().exp().detach() * (now - now.detach()).exp()
            return clipped(sequence, low or 3e-4, high or 4e-4)
        case "cispo":
            return -ratio.detach().clamp(max=high or 5.0) * a * now
        case "dppo":
            moved = now.exp().detach() - behaviour.exp()
            masked = ((a > 0) & (moved > (high or 0.2))) | ((a < 0) & (moved < -(low or 0.2)))
            weight = torch.where(masked, 0.0, 1.0)
            return -a * (now - behaviour).exp() * weight + 1e-3 * (now - behaviour) ** 2
        case _:
            assert algorithm.loss == "reinforce"
            return -a * now


def reduce(config: JobConfig, losses: Tokens) -> Tensor:
    """Make one number of the token losses of a minibatch."""
    length = config.algorithm.loss_agg_length or config.rollout.max_response_tokens
    means = torch.stack([item.mean() for item in losses])
    totals = torch.stack([item.sum() for item in losses])
    match config.algorithm.loss_agg:
        case "token-mean":
            return torch.cat(losses).mean()
        case "seq-mean-token-mean":
            return means.mean()
        case "seq-mean-token-sum":
            return totals.mean()
        case "seq-mean-token-sum-norm":
            return totals.mean() / length


def kl(config: JobConfig, now: Tensor, reference: Tensor) -> Tensor:
    """Return the KL estimate of each token."""
    x = now - reference
    match config.algorithm.kl_estimator:
        case "k1":
            return x
        case "k2":
            return x**2 / 2
        case "k3":
            return torch.exp(-x) - 1 + x
        case "k1+":
            return x.detach() + (x**2 - (x**2).detach()) / 2
        case "k3+":
            return (torch.exp(-x) - 1 + x).detach() + (x**2 - (x**2).detach()) / 2


def plain_step(
    model: nn.Module,
    reference: nn.Module,
    config: JobConfig,
    data: Episodes,
    advantages_of: Callable[[list[float]], Tokens] | None = None,
) -> None:
    """Train `model` in place; the gradient of its last update stays in `.grad`."""
    algorithm, learner, temperature = config.algorithm, config.learner, config.rollout.temperature
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learner.lr, betas=learner.betas, eps=learner.eps, weight_decay=0.01
    )
    with torch.no_grad():
        old, unsure = plain_logprobs(model, data.trajectories, temperature)
        frozen, _ = plain_logprobs(reference, data.trajectories, temperature)
    if advantages_of is not None:
        rewards = [item.reward for item in data.trajectories]
        if algorithm.kl_coef and algorithm.kl_in == "reward":
            penalties = [kl(config, o, r) for o, r in zip(old, frozen, strict=True)]
            rewards = [
                reward - algorithm.kl_coef * float(penalty.sum())
                for reward, penalty in zip(rewards, penalties, strict=True)
            ]
        data.advantages = advantages_of(rewards)
    if algorithm.entropy_share < 1:
        least = np.quantile(torch.cat(unsure).double().numpy(), 1 - algorithm.entropy_share)
        data.advantages = [
            torch.where(of.double() >= least, advantages, 0.0)
            for advantages, of in zip(data.advantages, unsure, strict=True)
        ]
    kept = m2po_kept(old, data.behaviour)
    num_groups = data.group[-1] + 1
    parts = np.array_split(np.arange(num_groups), learner.num_minibatches)
    for part in parts * learner.ppo_epochs:
        chosen = [at for at, group in enumerate(data.group) if group in part]
        optimizer.zero_grad()
        now, entropies = plain_logprobs(
            model, [data.trajectories[at] for at in chosen], temperature
        )
        some = Episodes(*([getattr(data, name)[at] for at in chosen] for name in vars(data)))
        before = [old[at] for at in chosen]
        weights, around = correction(config, now, before, some, [kept[at] for at in chosen])
        losses = [
            weights[at] * policy_loss(config, now[at], around[at], some, at)
            for at in range(len(chosen))
        ]
        loss = reduce(config, losses)
        if algorithm.kl_coef and algorithm.kl_in == "loss":
            penalties = [kl(config, now[i], frozen[at]) for i, at in enumerate(chosen)]
            loss = loss + algorithm.kl_coef * reduce(config, penalties)
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * reduce(config, entropies)
        loss.backward()
        optimizer.step()
