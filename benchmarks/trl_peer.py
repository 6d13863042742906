"""TRL's GRPOTrainer on the same model, prompts and sizes, in a process of its own.

    python -m benchmarks.trl_peer SETTINGS.json RESULT.json

Five ways to meet an environment: `none` (a reward function, for the addition), `sums` (a reward
function that steps the games of all episodes at the same time in a thread pool), `rollout` (a
`rollout_func` as a careful user writes it: batched generation with TRL's own generate, then the
steps of all episodes at the same time in a thread pool), `tools` (TRL's own environments, whose
methods the model calls as tools), `count` (the class of count_environment.py). Settings that cost
TRL time for nothing here are off: gradient checkpointing, logging of completions, the reference
model.
"""

# TRL and datasets are of the `bench` extra, which development does without, and the stubs of
# transformers hold what the rooms use.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.envs.games.calculator import CALL, calculate
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.count_environment import RESPONSE, CountEnvironment
from benchmarks.slow_game import SlowCalculatorGame, SlowSumsGame, draw_delay_s

Settings = dict[str, Any]
_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "=",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "calculator", "arguments": {"formula": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}
"""How TRL finds a tool call in what the model says: `=12*34`."""


class Clock(TrainerCallback):
    """Notes when each step ended, and the mean reward of each."""

    def __init__(self) -> None:
        self.ended = list[float]()
        self.rewards = list[float]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.ended.append(time.time())

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Note the reward."""
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def common_config(settings: Settings) -> dict[str, Any]:
    """Return the settings of both of TRL's trainers for what the other side trains."""
    num_samples = settings["batch_size"] * settings["group_size"]
    pass_samples = settings.get("pass_samples") or num_samples
    on_gpu = bool(settings.get("on_gpu"))
    return {
        "output_dir": settings["output_dir"],
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "seed": settings.get("seed", 0),
        "max_steps": settings["num_steps"],
        "per_device_train_batch_size": pass_samples,
        "gradient_accumulation_steps": num_samples // pass_samples,
        "num_generations": settings["group_size"],
        "max_completion_length": settings["max_response_tokens"],
        "learning_rate": settings["lr"],
        "lr_scheduler_type": settings.get("schedule", "constant"),
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "max_tool_calling_iterations": 1,
        "logging_steps": 1,
        "log_completions": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 0,
    }


def grpo_config(settings: Settings) -> GRPOConfig:
    """Return the settings of the synchronous trainer, on a GPU with vLLM in its process."""
    own: dict[str, Any] = {
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "shuffle_dataset": False,
    }
    if settings.get("on_gpu"):
        own |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
    return GRPOConfig(**common_config(settings), **own)


def grpo_trainer(settings: Settings, **arguments: Any) -> GRPOTrainer:
    """Return the synchronous trainer."""
    return GRPOTrainer(
        model=load_causal_lm(settings["model"], dtype=torch.float32),
        args=grpo_config(settings),
        peft_config=lora_config(settings),
        **arguments,
    )


def async_trainer(settings: Settings, **arguments: Any) -> Any:
    """Return the asynchronous trainer, which asks the vLLM of `serving`."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    own = {"vllm_server_base_url": settings["server"], "max_staleness": settings["max_staleness"]}
    return AsyncGRPOTrainer(
        model=settings["model"],
        args=AsyncGRPOConfig(**common_config(settings), **own),
        peft_config=lora_config(settings),
        **arguments,
    )


def lora_config(settings: Settings) -> Any:
    """Return the adapter that is trained; None: all weights are."""
    if not settings.get("lora_rank"):
        return None
    from peft import LoraConfig

    rank = settings["lora_rank"]
    return LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[None]:
    """Start the vLLM that the asynchronous trainer needs, on the same GPU.

    It gets adapters as files: whole weights would come by NCCL, which refuses two ranks on one GPU.
    """
    if "server" not in settings:
        yield
        return
    port, rank = settings["server"].rpartition(":")[2], str(max(8, settings["lora_rank"]))
    command = ["vllm", "serve", settings["model"], "--port", port, "--host", "127.0.0.1"]
    options = ["--enable-lora", "--max-lora-rank", rank, "--max-loras", "4"]
    shared = ["--gpu-memory-utilization", "0.4", "--max-model-len", "1024"]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    process = subprocess.Popen([*command, *options, *shared], env={**os.environ, **own})
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# -- addition ----------------------------------------------------------------------------------


def right_answer(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """Reward function of the addition: 1 for the right number."""
    said = [completion[0]["content"].strip() for completion in completions]
    return [float(text == truth) for text, truth in zip(said, ground_truth, strict=True)]


# -- sums, by a reward function ----------------------------------------------------------------


@dataclass
class SumsReward:
    """Reward function of the sums: the steps of all games at the same time.

    The asynchronous trainer sends it to another process.
    """

    scale: float
    workers: int
    __name__ = "last_number"

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Where games play."""
        return ThreadPoolExecutor(self.workers)

    def __call__(self, completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
        """Return the reward of each answer."""
        return list(self.threads.map(self._play, completions, ground_truth))

    def _play(self, completion: Any, truth: str) -> float:
        game = SlowSumsGame(scale=self.scale)
        game.reset(ground_truth=truth)
        return game.step(completion[0]["content"]).reward


# -- the calculator, by a rollout function -----------------------------------------------------


class Rollout:
    """Two turns for all episodes of a step: generate together, step at the same time."""

    def __init__(self, settings: Settings) -> None:
        self._truth = {row["question"]: row["ground_truth"] for row in settings["rows"]}
        self._threads = ThreadPoolExecutor(settings["env_workers"])
        self._scale = settings["delay_scale"]

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return prompts, completions with masks, and rewards."""
        tokenizer: Any = trainer.processing_class
        trainer.generation_config.max_new_tokens = 12  # of one turn, as on the other side
        games = [self._game(prompt[-1]["content"]) for prompt in prompts]
        prompt_ids = [self._render(tokenizer, prompt) for prompt in prompts]
        completions, masks = [list[int]() for _ in prompts], [list[int]() for _ in prompts]
        rewards = [0.0] * len(prompts)
        running = list(range(len(prompts)))
        while running:
            contexts = [prompt_ids[index] + completions[index] for index in running]
            said, _ = trainer._generate_single_turn(contexts, None, {}, 1)
            texts = tokenizer.batch_decode(said, skip_special_tokens=True)
            playing = [games[index] for index in running]
            results = list(self._threads.map(SlowCalculatorGame.step, playing, texts))
            going_on = []
            for index, ids, result in zip(running, said, results, strict=True):
                completions[index] += ids
                masks[index] += [1] * len(ids)
                rewards[index] += result.reward
                if not result.done:
                    shown = self._between(tokenizer, ids, result.observation)
                    completions[index] += shown
                    masks[index] += [0] * len(shown)
                    going_on.append(index)
            running = going_on
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
            "game_reward": rewards,
        }

    def _game(self, question: str) -> SlowCalculatorGame:
        game = SlowCalculatorGame(scale=self._scale)
        game.reset(ground_truth=self._truth[question], extra_info={"question": question})
        return game

    def _render(self, tokenizer: Any, prompt: Any) -> list[int]:
        return tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def _between(self, tokenizer: Any, said: list[int], observation: str) -> list[int]:
        """Return the tokens between two turns of the policy."""
        closing = [] if said[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
        return closing + self._render(tokenizer, [{"role": "user", "content": observation}])


def game_reward(game_reward: list[float], **_: Any) -> list[float]:
    """Reward function of the rollout function: what the games said."""
    return game_reward


# -- the calculator, by TRL's own environments -------------------------------------------------


class CalculatorEnvironment:
    """The calculator as TRL's environments are written: its methods are tools."""

    scale = 1.0

    def reset(self, ground_truth: str, **_: Any) -> None:
        """Start an episode."""
        self._truth = ground_truth

    async def calculator(self, formula: str) -> str:
        """
        Compute a formula.

        Args:
            formula: two numbers and a sign between them.

        Returns:
            The result.
        """
        import asyncio

        await asyncio.sleep(self.scale * draw_delay_s())
        call = CALL.match(f"={formula}")
        return calculate(call) if call else "?"


async def last_answer(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """Judge the last words of every episode; the judging steps of all run at the same time."""
    import asyncio

    async def judge(completion: Any, truth: str) -> float:
        await asyncio.sleep(CalculatorEnvironment.scale * draw_delay_s())
        return float(str(completion[-1].get("content") or "").strip() == truth)

    pairs = zip(completions, ground_truth, strict=True)
    return list(await asyncio.gather(*(judge(*pair) for pair in pairs)))


def with_tools(tokenizer: Any) -> Any:
    """Let a tokenizer render and parse tool calls in the tokens that the model knows."""
    tokenizer.chat_template = (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'tool' -%}{{ '<|user|>' + message['content'] + '<|end|>' }}"
        "{%- else -%}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
        "{%- for call in message['tool_calls'] or [] -%}"
        "{%- if call.function.name == 'calculator' -%}"
        "{{ '=' + (call.function.arguments.formula or '') }}"
        "{%- else -%}{{ call.function.name + call.function.arguments | tojson }}{%- endif -%}"
        "{%- endfor -%}{{ '<|end|>' }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
    )
    tokenizer.response_template = _RESPONSE
    return tokenizer


def with_response(tokenizer: Any) -> Any:
    """Let a tokenizer parse the calls that the model of the counting knows."""
    tokenizer.response_template = RESPONSE
    return tokenizer


# -- all of them -------------------------------------------------------------------------------


def ways(settings: Settings, tokenizer: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the arguments of the trainer for each way to meet an environment."""
    CalculatorEnvironment.scale = settings["delay_scale"]
    return {
        "none": lambda: {"reward_funcs": right_answer, "processing_class": tokenizer},
        "sums": lambda: {
            "reward_funcs": SumsReward(settings["delay_scale"], settings["env_workers"]),
            "processing_class": tokenizer,
        },
        "rollout": lambda: {
            "reward_funcs": game_reward,
            "rollout_func": Rollout(settings),
            "processing_class": tokenizer,
        },
        "tools": lambda: {
            "reward_funcs": last_answer,
            "environment_factory": CalculatorEnvironment,
            "processing_class": with_tools(tokenizer),
        },
        "count": lambda: {
            "environment_factory": CountEnvironment,
            "processing_class": with_response(tokenizer),
        },
    }


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns: those of a question, or of a class that has its own."""
    if "question" not in rows[0]:
        return {name: [row[name] for row in rows] for name in rows[0]}
    return {
        "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
        "ground_truth": [row["ground_truth"] for row in rows],
    }


def main() -> None:
    """Train as the settings say, and write when each step ended and its reward."""
    settings: Settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    rows = settings["rows"]
    data = columns(rows)
    tokenizer = load_tokenizer(settings["model"])
    clock = Clock()
    make = async_trainer if "server" in settings else grpo_trainer
    with serving(settings):
        trainer = make(
            settings,
            train_dataset=Dataset.from_dict(data),
            callbacks=[clock],
            **ways(settings, tokenizer)[settings["way"]](),
        )
        trainer.remove_callback(PrinterCallback)
        started = time.time()
        trainer.train()
    result = {"started": started, "ended": clock.ended, "rewards": clock.rewards}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
