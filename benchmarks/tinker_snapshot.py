"""From save_weights_for_sampler to the first token that is sampled with the new weights.

    python -m benchmarks.tinker_snapshot [--rounds 60]

The whole stack as processes, a gateway before it, and one client over one connection, as the SDK
has it: an adapter of rank 8 on the tiny model is saved for sampling without a name, which is
awaited, and one token is sampled from it, which is awaited. Once with the sampler to itself, once
beside a session that samples all the time.
"""

import asyncio
import http.client
import json
import tempfile
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from tinkermq.actors.policy.tiny_models import save_tiny_model

from benchmarks.report import Report, parser
from benchmarks.stack import Stack
from tests.support.gateway import run_gateway

BASE = "org/tiny"
RANK = 8
LIMIT_MS = 50.0
PARTS = ("submit", "saved", "asked", "sampled")
_START_S = 60.0


class Session:
    """One client's session with a model of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        self._name = self.post("create_session", sdk_version="0.38.0", tags=[])["session_id"]
        made = self.post(
            "create_model",
            session_id=self._name,
            model_seq_id=0,
            base_model=BASE,
            lora_config={"rank": RANK},
        )
        self.wait(made)
        self._model, self._seq = made["model_id"], 0

    def post(self, path: str, **body: Any) -> Any:
        """Return what an endpoint answers; bytes for protobuf."""
        headers = {"X-API-Key": "tml-anybody", "Content-Type": "application/json"}
        self._connection.request("POST", f"/tinker/api/v1/{path}", json.dumps(body), headers)
        answer = self._connection.getresponse()
        read = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{path}: {answer.status} {read[:300]!r}")
        return read if "protobuf" in answer.headers["content-type"] else json.loads(read)

    def wait(self, taken: Any) -> Any:
        """Return the result of a request."""
        return self.post("retrieve_future", request_id=taken["request_id"])

    def snapshot(self) -> list[float]:
        """Save, sample a token; return when each part was done."""
        self._seq += 1
        times = [time.perf_counter()]
        saving = self.post(
            "save_weights_for_sampler",
            model_id=self._model,
            seq_id=self._seq,
            sampling_session_seq_id=self._seq,
        )
        times.append(time.perf_counter())
        sampler = self.wait(saving)["sampling_session_id"]
        times.append(time.perf_counter())
        asked = self.ask(sampler, 0, max_tokens=1)
        times.append(time.perf_counter())
        self.wait(asked)
        times.append(time.perf_counter())
        self.sampler = sampler
        return times

    def ask(self, sampler: str, seq: int, *, max_tokens: int, num_samples: int = 1) -> Any:
        """Hand a prompt to a sampler."""
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq,
            num_samples=num_samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [20, 21, 22]}]},
            sampling_params={"max_tokens": max_tokens, "stop": []},
        )


def measure(url: str, rounds: int) -> list[list[float]]:
    """Return milliseconds of each part, and of all, for each snapshot."""
    session = Session(url)
    session.snapshot()  # the first one warms up
    took: list[list[float]] = []
    for _ in range(rounds):
        times = session.snapshot()
        parts = [1000 * (end - begin) for begin, end in pairwise(times)]
        took.append([*parts, sum(parts)])
    return took


def keep_sampling(url: str, over: threading.Event) -> None:
    """Sample with an adapter of one's own until it is over."""
    session = Session(url)
    session.snapshot()
    seq = 0
    while not over.is_set():
        seq += 1
        session.wait(session.ask(session.sampler, seq, max_tokens=200, num_samples=4))


async def serve(folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Run the stack, and measure."""
    model = save_tiny_model(folder / "model", width=64, layers=2)
    config = {
        "model": {"path": str(model)},
        "env": {"game": "", "hosts": 0, "num_val": 0},
        "tinker": {"base": BASE},
        "output_dir": str(folder / "runs"),
    }
    async with Stack(folder) as stack, run_gateway(stack.server.url, folder) as gateway:
        await stack.pool.submit(config, kind="tinker")
        deadline = time.monotonic() + _START_S
        while True:
            try:
                await asyncio.to_thread(measure, gateway.url, 1)
                break
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
        found = {"alone": await asyncio.to_thread(measure, gateway.url, rounds)}
        over = threading.Event()
        busy = asyncio.create_task(asyncio.to_thread(keep_sampling, gateway.url, over))
        await asyncio.sleep(1)
        found["beside one that samples"] = await asyncio.to_thread(measure, gateway.url, rounds)
        over.set()
        await busy
    return found


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60)
    arguments = options.parse_args()
    warnings.filterwarnings("ignore")
    report = Report("tinker_snapshot", "New weights to their first token", quick=arguments.quick)
    with tempfile.TemporaryDirectory() as folder:
        rounds = 3 if arguments.quick else arguments.rounds
        found = asyncio.run(serve(Path(folder), rounds))
    rows = [
        [name, *(f"{median(part):.1f} ms" for part in zip(*took, strict=True))]
        for name, took in found.items()
    ]
    title = f"rank {RANK}, tiny model, medians of {rounds}"
    report.table(title, ["the sampler", *PARTS, "together"], rows)
    for name, took in found.items():
        whole = sorted(each[-1] for each in took)
        limit = LIMIT_MS if name == "alone" else None
        report.at_most(f"{name}: save to first token", median(whole), limit, "ms")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
