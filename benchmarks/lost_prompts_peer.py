"""TRL's asynchronous trainer for lost_prompts.py: `train`, and the server that generates, `serve`.

    python -m benchmarks.lost_prompts_peer train|serve SETTINGS.json

The prompt of row i is its number, so that the tokens of a step say which prompts it trains.
"""

# TRL and datasets are of the `bench` group, which development does without.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportCallIssue=false

import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ROW = re.compile(r"\d+")
_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"<\|end\|>", "content": "text"}},
}
_TOKENS = 3
_SHORT_S, _LONG_S, _LONG_SHARE = 0.02, 0.6, 0.1
"""Seconds of a generation; one in ten is long, so that groups end in another order."""


# -- the server ------------------------------------------------------------------------------------


class Completions(BaseHTTPRequestHandler):
    """Answers as vLLM's server does, with random tokens."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer `/health` and `/v1/models`."""
        self._answer({"data": [{"id": "model", "max_model_len": 256}]})

    def do_POST(self) -> None:
        """Answer `/v1/completions`."""
        self.rfile.read(int(self.headers["content-length"] or 0))
        time.sleep(_LONG_S if random.random() < _LONG_SHARE else _SHORT_S)
        tokens = [random.randrange(5, 15) for _ in range(_TOKENS)]
        logprobs = {"token_logprobs": [-2.3] * _TOKENS}
        self._answer({"choices": [{"text": "", "token_ids": tokens, "logprobs": logprobs}]})

    def _answer(self, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def serve(folder: Path) -> None:
    """Serve on the port of an earlier server of this run, or a new one."""
    file = folder / "port"
    server = ThreadingHTTPServer(
        ("127.0.0.1", int(file.read_text()) if file.is_file() else 0), Completions
    )
    file.write_text(str(server.server_port))
    server.serve_forever()


# -- the trainer -----------------------------------------------------------------------------------


class NoTransfer:
    """Sends no weights: tokens are random."""

    def init_weight_transfer(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Iterator[Any]) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""


def random_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward each completion at random."""
    return [random.random() for _ in completion_ids]


def rows_of(
    ids: Sequence[int], depths: Sequence[int], decode: Callable[[list[int]], str]
) -> set[int]:
    """Return the rows whose prompts a packed tree of tokens holds, in depth-first order."""
    rows: set[int] = set()
    path: list[int] = []
    for token, depth in zip(ids, depths, strict=True):
        path[depth:] = [token]
        text = decode(path)
        if text.endswith("+") and text.count("+") == 1:
            rows.add(int(_ROW.findall(text)[0]))
    return rows


def train(settings: dict[str, Any]) -> None:
    """Train, from the newest checkpoint if there is one; write the prompts of each step."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        async_rollout_worker,
        packing,
    )

    # A metric that asks for a GPU's name, whether vLLM is installed, which runs elsewhere, and a
    # kernel for GPUs: what is computed does not matter here.
    kernel = SimpleNamespace(flash_attn_varlen_func=lambda query, *_, **__: query)
    packing._flash_attn = lambda: kernel
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    folder = Path(settings["folder"])
    while not (folder / "port").is_file():
        time.sleep(0.1)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.response_template = _RESPONSE
    in_step: set[int] = set()

    class Trainer(AsyncGRPOTrainer):
        """Notes which prompts the tokens of a step are of."""

        def training_step(
            self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
        ) -> Any:
            """Train, and note."""
            places = (inputs[name].flatten().tolist() for name in ("input_ids", "position_ids"))
            in_step.update(rows_of(*places, tokenizer.decode))
            return super().training_step(model, inputs, num_items_in_batch)

    class Notes(TrainerCallback):
        """Writes down each step that has ended."""

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            """Write the step and its prompts."""
            with (folder / "trained.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": state.global_step, "prompts": sorted(in_step)}) + "\n"
                )
            in_step.clear()

    config = AsyncGRPOConfig(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        bf16=False,
        seed=0,
        num_train_epochs=1,
        per_device_train_batch_size=settings["batch"] * settings["group"],
        gradient_accumulation_steps=1,
        heartbeat_stale_after_s=20,  # a dead worker is noticed sooner than after 300 s
        token_budget=-1,  # as many samples a step as configured
        num_generations=settings["group"],
        max_completion_length=_TOKENS,
        learning_rate=1e-5,
        max_staleness=settings["max_staleness"],
        max_inflight_tasks=settings["max_requests"],
        save_strategy="steps",
        save_steps=settings["save_every"],
        vllm_server_base_url=f"http://127.0.0.1:{(folder / 'port').read_text()}",
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to="none",
    )
    rows = [[{"role": "user", "content": f"{row}+"}] for row in range(settings["prompts"])]
    trainer: Any = Trainer(
        model=settings["model"],
        reward_funcs=random_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        callbacks=[Notes()],
        weight_transfer=NoTransfer(),
    )
    start = trainer.rollout_worker.start

    def start_and_tell() -> None:
        start()
        (folder / "worker.pid").write_text(str(trainer.rollout_worker._process.pid))

    trainer.rollout_worker.start = start_and_tell
    checkpoints = folder / "checkpoints"
    for one in checkpoints.glob("checkpoint-*"):
        if not (one / "trainer_state.json").is_file():  # killed while it was written
            shutil.rmtree(one)
    newest = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    read: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "serve":
        serve(Path(read["folder"]))
    else:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        train(read)
