"""How far a learner's log-probs are from its generator's, with and without its routers' choices.

    python -m benchmarks.router_replay [--sequences 64] [--lr 1e-5] [--engine vllm]

A Qwen3-MoE of random weights (6 layers of width 256, 32 experts of which 4 read a token) answers
prompts in the generator's engine, which records what its routers choose. The learner trains three
steps on those very answers: in the first its weights are the generator's (lag 0), then one and two
steps newer. Once it computes with the recorded experts (`algorithm.router_replay`), once with those
that its own routers choose. Figures are those that a run tells as `staleness/…`.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.policy.experts import RouterRecorder
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.rollout.recording import Transcript
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.report import Report, parser

DTYPES = ("float32", "bfloat16")
STEPS = 3
CONTEXT = 512
GROUP = 8


def make_model(folder: Path, *, quick: bool) -> None:
    """Write the model and a tokenizer."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 64 if quick else 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 64 if quick else 128,
        "num_hidden_layers": 2 if quick else 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def config_of(folder: Path, dtype: str, lr: float, *, replays: bool) -> JobConfig:
    """Return the job of the learner."""
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "algorithm": {"router_replay": replays},
            "learner": {"lr": lr, "dtype": dtype, "schedule": "constant"},
        }
    )


def engine_config(folder: Path, engine: str, dtype: str) -> JobConfig:
    """Return the job of the generator."""
    in_vllm = {"compile": False, "kv_cache_mb": 256} if engine == "vllm" else {}
    asked = {"engine": engine, "dtype": dtype, "max_requests": 32, "max_context": CONTEXT}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "algorithm": {"router_replay": True},
            "rollout": {
                "max_prompt_tokens": 64,
                "max_response_tokens": 256,
                "max_turn_tokens": 256,
            },
            "generator": asked | in_vllm,
        }
    )


async def generate(
    folder: Path, engine_name: str, dtype: str, num: int, new_tokens: int
) -> list[Group]:
    """Let the engine answer prompts, each several times, and reward the answers at random."""
    engine = await start_engine(engine_config(folder, engine_name, dtype))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 264, int(rng.integers(8, 64))) for _ in range(num // GROUP)]

    async def answer(place: int) -> Trajectory:
        transcript = Transcript()
        transcript.begin(prompts[place // GROUP].tolist(), [], "")
        sampling = Sampling(new_tokens, seed=place)
        transcript.end_turn(
            [], await engine.generate(transcript.token_ids, sampling, request_id=str(place))
        )
        transcript.rewards.append(float(np.random.default_rng(place).integers(2)))
        return transcript.trajectory("done", "", stop_token_ids=(), seed=0)

    made = await asyncio.gather(*(answer(place) for place in range(num)))
    await engine.close()
    return [
        Group(
            task=Task(task=at // GROUP, seed=0, group_size=GROUP),
            trajectories=made[at : at + GROUP],
            source="benchmark",
        )
        for at in range(0, num, GROUP)
    ]


def trained(config: JobConfig, groups: list[Group]) -> list[dict[str, float]]:
    """Train on the answers; return what each step tells."""
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=STEPS)
    batch = assemble(groups)
    return [trainer.step(batch, step).numbers for step in range(1, STEPS + 1)]


@torch.no_grad()
def flipped(config: JobConfig, groups: list[Group]) -> tuple[float, float]:
    """Return the shares of choices, and of tokens, in which the learner's routers differ."""
    model = cast(Any, load_model(config.model, config.learner))
    inside = Parallel().place(model, config.learner)
    scorer = Scorer(model, temperature=1.0, inside=inside)
    recorder = RouterRecorder(model)
    differs: list[np.ndarray] = []
    for item in (item for group in groups for item in group.trajectories):
        sequence = TokenSequence(item.token_ids, item.mask)
        [packed] = pack([sequence], max_row_tokens=CONTEXT, microbatch_tokens=CONTEXT)
        scorer.score(packed)
        own, told = recorder.take_choices(), cast("np.ndarray", item.experts)
        differs.append((own[..., None] != told[..., None, :]).all(-1).reshape(len(own), -1))
    together = np.concatenate(differs)
    return float(together.mean()), float(together.any(1).mean())


def measure(report: Report, folder: Path, options: argparse.Namespace) -> None:
    """Measure both dtypes, with and without."""
    rows: list[list[str]] = []
    for dtype in DTYPES:
        new_tokens = 32 if options.quick else 128
        groups = asyncio.run(generate(folder, options.engine, dtype, options.sequences, new_tokens))
        by_way = {
            replays: trained(config_of(folder, dtype, options.lr, replays=replays), groups)
            for replays in (False, True)
        }
        for lag in range(STEPS):
            for replays, steps in by_way.items():
                told = {
                    name: steps[lag][f"staleness/{name}/lag_{lag}"]
                    for name in ("abs_log_ratio", "max_ratio", "k3")
                }
                rows.append(
                    [
                        dtype,
                        str(lag),
                        "replayed" if replays else "its own",
                        f"{told['abs_log_ratio']:.2e}",
                        f"{told['max_ratio']:.4f}",
                        f"{told['k3']:.1e}",
                    ]
                )
        choices, tokens = flipped(config_of(folder, dtype, options.lr, replays=False), groups)
        report.note(
            f"{dtype}: at lag 0 the learner's routers choose another expert in {choices:.2%} of "
            f"the choices, in at least one layer for {tokens:.1%} of the tokens."
        )
        without, replayed = (
            by_way[replays][0]["staleness/abs_log_ratio/lag_0"] for replays in (False, True)
        )
        report.at_least(
            f"{dtype}, lag 0: mean |log ratio| without over with", without / replayed, None
        )
    report.table(
        "Log-probs of the learner beside those of its generator",
        ["dtype", "lag", "experts", "mean |log ratio|", "largest ratio", "k3"],
        rows,
    )


def main() -> None:
    """Run it."""
    options_of = parser(__doc__)
    options_of.add_argument("--sequences", type=int, default=64)
    options_of.add_argument("--lr", type=float, default=1e-5)
    options_of.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    options = options_of.parse_args()
    if options.quick:
        options.sequences = 16
    torch.set_num_threads(1)
    report = Report("router_replay", "Replaying what routers chose (R3)", quick=options.quick)
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made), quick=options.quick)
        measure(report, Path(made), options)
    report.finish(options.json)


if __name__ == "__main__":
    main()
