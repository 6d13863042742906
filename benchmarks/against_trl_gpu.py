"""On one GPU against TRL with vLLM: samples per second and reward, over three seeds.

    python -m benchmarks.against_trl_gpu [--model smollm2|qwen3] [--seeds 3]

It needs a GPU, `tinkermq[vllm]`, TRL and aiohttp. Three sides, each on the same GPU, in turns:

- ours: learner and vLLM share the GPU, `max_staleness` 2;
- TRL's GRPOTrainer with vLLM in its process (`vllm_mode="colocate"`), which is synchronous;
- TRL's AsyncGRPOTrainer beside a `vllm serve`, with the same bound on staleness. It sends whole
  weights by NCCL, which refuses two ranks on one GPU, and adapters as files: it takes part where
  adapters are trained.

`smollm2` learns the sums of `tinkermq quickstart --real`, with all weights and with an adapter.
`qwen3` has the layers of Qwen3-0.6B with random weights and SmolLM2's vocabulary, and long answers:
its reward says nothing. The engine of our job is measured alone, too: the loop should generate at
nine tenths of its speed.

Without a GPU only `--quick` runs, the dry form: the tiny model of the addition, transformers in the
place of vLLM, one seed, and no asynchronous trainer.
"""

import asyncio
import shutil
import socket
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.schemas.config.load_config import parse_config

from benchmarks.against_trl import Contest, compete, tell
from benchmarks.against_trl_language_model import sums_job
from benchmarks.engine import generated_per_s
from benchmarks.learner_step import let_go
from benchmarks.report import Report, parser
from benchmarks.sizes import language_model, qwen3, save_random_weights
from benchmarks.tasks import CACHE, addition_job, in_training_order, rows_of_job, warm_model

WARM = 5
STEPS = 40
DRY_STEPS, QUICK_TASKS = 4, 2
STALENESS = 2
LORA_RANK = 16
LONG = 256
"""Tokens of an answer of random weights, which end none."""
LOOP_OVER_ENGINE = 0.9
COLOCATED, ASYNCHRONOUS = "TRL, vLLM in its process", "TRL, asynchronous"
TARGET = 1.0
TOKENIZER = ("tokenizer*", "special_tokens*", "vocab*", "merges*", "chat_template*")


def qwen3_folder() -> Path:
    """Return a model with the layers of Qwen3-0.6B, and the tokenizer of SmolLM2."""
    folder, given = CACHE / "qwen3-0.6b-shape", Path(language_model())
    if not (folder / "config.json").is_file():
        save_random_weights(qwen3(1024, 28, 16, 3072, vocab_size=49152), folder)
        for pattern in TOKENIZER:
            for file in given.glob(pattern):
                shutil.copy(file, folder)
    return folder


def gpu_job(model: str, lora_rank: int) -> dict[str, Any]:
    """Return the job of a model, which generates with vLLM on the learner's GPU."""
    job = sums_job(STEPS, quick=False)
    job["training"]["max_staleness"] = STALENESS
    job |= {"placement": "colocated", "lora": {"rank": lora_rank, "targets": "all-linear"}}
    job["generator"] = {"engine": "vllm"}
    if model == "qwen3":
        job["model"]["path"] = str(qwen3_folder())
        job["rollout"] |= {"max_turn_tokens": LONG, "max_response_tokens": LONG}
        for key in ("max_row_tokens", "microbatch_tokens"):
            del job["learner"][key]
    return job


def gpu_contest(model: str, lora_rank: int) -> Contest:
    """Return the contest of a model, with all weights or with an adapter."""
    more: dict[str, Any] = {"on_gpu": True, "lora_rank": lora_rank, "max_staleness": STALENESS}
    ways = {COLOCATED: ("sums", STEPS)}
    if lora_rank:
        ways[ASYNCHRONOUS] = ("sums", STEPS)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{held.getsockname()[1]}"
    trained = f"an adapter of rank {lora_rank}" if lora_rank else "all weights"
    return Contest(
        f"{model}, {trained}",
        gpu_job(model, lora_rank),
        ways,
        [],
        delay_scale=0.0,
        warm=WARM,
        more={COLOCATED: more, ASYNCHRONOUS: more | {"server": server}},
    )


def dry_contest() -> Contest:
    """Return a contest for a machine without a GPU."""
    job = addition_job(warm_model("addition", quick=True), DRY_STEPS)
    job["training"]["batch_size"] = QUICK_TASKS
    return Contest("dry form: addition", job, {"TRL": ("none", DRY_STEPS)}, [], warm=1)


async def run(contest: Contest, seeds: int, report: Report, *, dry: bool) -> None:
    """Run all sides with each seed, and the engine alone."""
    for seed in range(seeds):
        contest.job["seed"] = seed
        num_rows = contest.job["training"]["num_steps"] * contest.job["training"]["batch_size"]
        config = parse_config(contest.job)
        rows = in_training_order("addition", num_rows) if dry else rows_of_job(config, num_rows)
        contest.rows[:] = rows
        for settings in contest.more.values():
            settings["seed"] = seed
        await compete(contest, 1)
    tell(contest, report, TARGET)
    await tell_loop(contest, report)


async def tell_loop(contest: Contest, report: Report) -> None:
    """Print the generated tokens per second in our loop over those of the engine alone."""
    config = parse_config(contest.job)
    chat = ChatTokenizer(load_tokenizer(config.model.path))
    wanted = [row["question"] for row in contest.rows] * config.rollout.group_size
    prompts = [chat.first_prompt([{"role": "user", "content": one}]) for one in wanted]
    let_go()
    alone = await generated_per_s(config, prompts[:1024], chat.stop_token_ids)
    rates: list[float] = []
    for side in contest.sides["tinkermq"]:
        assert side.run is not None
        counted = side.run.metrics[contest.warm :]
        tokens = sum(one.values["rollout/generated_tokens"] for one in counted[1:])
        rates.append(tokens / (counted[-1].time - counted[0].time) if len(counted) > 1 else 0.0)
    report.table(
        f"{contest.name}: generated tokens/s",
        ["engine alone", "in the loop, each seed"],
        [[f"{alone:,.0f}", " ".join(f"{rate:,.0f}" for rate in rates)]],
    )
    target = LOOP_OVER_ENGINE if torch.cuda.is_available() else None
    report.at_least(f"{contest.name}, loop over engine", median(rates) / alone, target)


def main() -> None:
    """Parse the arguments, run all sides, print and write."""
    options = parser(__doc__)
    options.add_argument("--model", choices=["smollm2", "qwen3"], help="only this one")
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    dry = not torch.cuda.is_available()
    if dry and not arguments.quick:
        options.error("torch sees no GPU here; --quick runs the dry form")
    report = Report("against_trl_gpu", "On one GPU against TRL 1.16 with vLLM", quick=dry)
    if dry:
        asyncio.run(run(dry_contest(), 1, report, dry=True))
        report.note(f"{ASYNCHRONOUS}: left out, it needs vLLM and a GPU.")
    for model in [] if dry else [arguments.model] if arguments.model else ["smollm2", "qwen3"]:
        for lora_rank in (0, LORA_RANK):
            seeds = 1 if arguments.quick else arguments.seeds
            asyncio.run(run(gpu_contest(model, lora_rank), seeds, report, dry=False))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
