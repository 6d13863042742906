"""A Tinker session on SmolLM2-135M: against plain PyTorch with PEFT, and against skyrl-tx.

    python -m benchmarks.tinker_real [--rounds 2] [--steps 6]

The model is of the catalogue (`tinkermq model get smollm2`). The step of a session is compared with
a training script's in one process, one CPU thread, both sides in turns, as in
`benchmarks/tinker_step.py`. The session of an SDK is compared with one on skyrl-tx 0.3.0, with its
CPU backend and all of the machine's cores, as in `benchmarks/tinker_peer.py`, which says how to
install it; without it, a note says so.
"""

import asyncio
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from tinkermq.schemas.model_catalogue import find_model
from transformers.utils.logging import disable_progress_bar

from benchmarks import tinker_peer, tinker_step
from benchmarks.report import Report, parser
from benchmarks.stack import REPOSITORY

MODEL = "smollm2"
PEER = "skyrl-tx 0.3.0"
OVER_PLAIN, OVER_PEER = 0.85, 1.5
SIZE = tinker_step.Size("135 M", 576, 30, 49_152, 8, 128)
QUICK = tinker_step.Size("135 M", 576, 30, 49_152, 2, 8)
_WARM = 2
"""Steps of a session before the first that counts: a peer compiles in them."""
_SILENT_S = 400.0


def measure_step(size: tinker_step.Size, rounds: int, report: Report) -> None:
    """Compare a session's step with one of a training script."""
    folder = Path(find_model(MODEL))
    rows: list[list[str]] = []
    for kind in tinker_step.KINDS:
        ours, plain, ratio = tinker_step.compare(size, kind, folder, rounds)
        tokens = f"{size.datums} × {size.tokens}"
        rows.append([tokens, kind, f"{ours:.2f} s", f"{plain:.2f} s", f"{1 / ratio:.2f}×"])
        is_target = kind == "one length"
        report.at_least(
            f"a step over plain PyTorch and PEFT, {kind}",
            1 / ratio,
            OVER_PLAIN if is_target else None,
        )
    columns = ["tokens", "data", "a session's step", "plain", "ratio of speeds"]
    report.table(f"rank {tinker_step.RANK}, float32, cross_entropy, one thread", columns, rows)


async def measure_session(folder: Path, arguments: Any, report: Report) -> None:
    """Compare sessions of an SDK on both services."""
    steps, speeds = arguments.steps, dict[str, float]()
    for name, sdk in ((PEER, arguments.peer), ("here", arguments.sdk)):
        place = folder / name.split()[0]
        copy_model(place / "model")
        opened = tinker_peer.ours(place) if name == "here" else tinker_peer.theirs(place, sdk)
        async with opened as service:
            told = await tinker_peer.session(service, sdk, steps, silent_s=_SILENT_S)
        speeds[name] = tinker_peer.rate(told, steps, _WARM)
    tokens = f"{tinker_peer.SEQUENCES} sequences of {tinker_peer.TOKENS} tokens a step"
    report.table(
        f"{tokens}, rank {tinker_peer.RANK}, {steps} steps",
        ["service", "seconds a step"],
        [[name, f"{1 / speed:.2f}"] for name, speed in speeds.items()],
    )
    report.at_least(f"steps per second, against {PEER}", speeds["here"] / speeds[PEER], OVER_PEER)


def copy_model(folder: Path) -> None:
    """Make a folder of the model that the peer reads, too; its weights are a link."""
    source = Path(find_model(MODEL))
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    tinker_peer.make_readable(folder)


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    environments, python = REPOSITORY / ".tinker", Path("bin", "python")
    options.add_argument("--peer", type=Path, default=environments / "skyrl" / python)
    options.add_argument("--sdk", type=Path, default=environments / "newest" / python)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--steps", type=int, default=6)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    warnings.filterwarnings("ignore")
    report = Report("tinker_real", "A Tinker session on SmolLM2-135M", quick=arguments.quick)
    measure_step(
        QUICK if arguments.quick else SIZE, 1 if arguments.quick else arguments.rounds, report
    )
    missing = [str(one) for one in (arguments.peer, arguments.sdk) if not one.is_file()]
    if missing:
        report.note(f"{PEER} was not measured: there is no {', '.join(missing)}.")
    elif arguments.quick:
        report.note(f"{PEER} is measured without --quick only.")
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure_session(Path(folder), arguments, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
