"""The examples with which `--help` of a command ends.

`train.yaml` stands for the configuration that `tinkermq env new` writes, `my-run` for a run. A test
reads every example out of `--help`, parses it, and runs it where that needs no pool.
"""

from typing import NamedTuple


class Example(NamedTuple):
    """One command line, and what it is for."""

    line: str
    meaning: str


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "quickstart": (
        Example("tinkermq quickstart", "below ./outputs"),
        Example("tinkermq quickstart training.num_steps=20", "a third of the steps"),
    ),
    "up": (
        Example("tinkermq up", "a pool on this machine"),
        Example("tinkermq up --slots 2 --no-gateway", "a smaller one, without dashboard"),
        Example("tinkermq up --on slurm:gpu", "machines of a partition, as jobs need them"),
    ),
    "train": (
        Example("tinkermq train train.yaml --dry-run", "check everything, submit nothing"),
        Example("tinkermq train train.yaml learner.lr=1e-5 name=my-run", "submit, and watch"),
        Example("tinkermq train train.yaml --from my-run@40 -d", "begin with a run's weights"),
    ),
    "sft": (
        Example("tinkermq sft sft.yaml sft.data=[chats.jsonl] name=warm", "learn, and watch"),
        Example("tinkermq train train.yaml --from warm", "go on by playing"),
    ),
    "sweep": (
        Example(
            "tinkermq sweep train.yaml seed=1,2,3 learner.lr=1e-5,1e-4 --name lr",
            "six runs, four at a time",
        ),
        Example(
            "tinkermq sweep train.yaml learner.lr=1e-6..1e-4 --runs 8 --name lr --dry-run",
            "print eight drawn points",
        ),
    ),
    "ps": (
        Example("tinkermq ps", "what has not ended"),
        Example("tinkermq ps --all --json", "all runs, for a program"),
    ),
    "resume": (
        Example("tinkermq resume my-run", "after a pause, or from its last checkpoint"),
        Example("tinkermq resume my-run training.num_steps=80", "longer than it was"),
    ),
    "fork": (Example("tinkermq fork my-run@40 learner.lr=1e-5", "go on there, otherwise"),),
    "serve": (
        Example("tinkermq serve my-run@best", "an OpenAI-compatible endpoint"),
        Example("tinkermq serve ./my-model --servers 2 -d", "a folder, in the background"),
    ),
    "infer": (
        Example("tinkermq infer my-run@40 --max-samples 200", "its game, on its validation set"),
        Example(
            "tinkermq infer my-run@40 --samples 8 --temperature 1 -o results.jsonl",
            "pass@8, with every episode",
        ),
        Example("tinkermq infer my-run --game guess --tasks 3,14 highest=9", "a game, hosted here"),
    ),
    "logs": (
        Example("tinkermq logs my-run -f", "go on with new lines"),
        Example("tinkermq logs my-run --actor learner --attempt 1", "of one actor, once"),
    ),
    "rollouts": (
        Example("tinkermq rollouts my-run --sort reward", "the best first"),
        Example("tinkermq rollouts my-run --step 12 --json", "what one step trained"),
        Example("tinkermq rollouts outputs/my-run", "of a run's folder, without a pool"),
    ),
    "eval": (
        Example("tinkermq eval my-run", "the newest version"),
        Example("tinkermq eval my-run@40 evaluation.samples=8", "a checkpoint, 8 episodes a task"),
        Example("tinkermq eval --compare my-run@10 my-run@40", "which one is better"),
    ),
    "config show": (
        Example("tinkermq config show train.yaml", "what is in effect, with all defaults"),
        Example("tinkermq config show train.yaml learner.lr=1e-5 --json", "for a program"),
    ),
    "config schema": (
        Example("tinkermq config schema learner", "the keys of a section"),
        Example("tinkermq config schema training.max_staleness", "one key"),
        Example("tinkermq config schema --json", "the JSON Schema, for editors"),
    ),
    "algorithm check": (
        Example("tinkermq algorithm check my_losses:clipped --kind loss", "my_losses.py, here"),
    ),
    "agent new": (Example("tinkermq agent new my-agent", "a program that asks openai's client"),),
    "agent check": (
        Example("tinkermq agent check agent.yaml --row 0", "the first row of the data"),
    ),
    "env new": (
        Example("tinkermq env new my-game", "on rows of a dataset"),
        Example("tinkermq env new my-game --kind tools --into games", "with tools"),
    ),
    "env check": (
        Example("tinkermq env check guess", "a game that is installed"),
        Example("tinkermq env check train.yaml", "that of a configuration, with its data"),
        Example("tinkermq env check my_game.game:MyGameGame", "a class of your own"),
    ),
    "env play": (
        Example("tinkermq env play guess --seed 1", "type the policy's answers"),
        Example("tinkermq env play train.yaml --gold", "watch right answers"),
    ),
    "env eval": (
        Example("tinkermq env eval train.yaml --model my-run@40", "a checkpoint"),
        Example(
            "tinkermq env eval guess --model http://gpu-box:8000/v1 --max-samples 100",
            "any OpenAI-compatible endpoint",
        ),
    ),
}
"""By command."""


def epilogue(command: str) -> str | None:
    """Return what `--help` of a command ends with, in Markdown; None where it has no examples."""
    examples = EXAMPLES.get(command, ())
    if not examples:
        return None
    lines = "\n".join(f"# {example.meaning}\n{example.line}" for example in examples)
    return f"Examples:\n\n```\n{lines}\n```"
