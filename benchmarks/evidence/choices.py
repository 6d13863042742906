"""What the choice of an advantage, of a loss, and of LoRA does to learning.

    python -m benchmarks.evidence.choices

Runs what has no line in results/choices.jsonl yet: each game at a lag of 2, which pools here come
to by themselves, with the example's keys but for what is compared, and five seeds that all share.
A batch is trained in four updates: in one alone no ratio leaves 1, and losses that differ in their
clips are one and the same.
Learning rates are the examples' and were tuned for none of it but what the examples have (grpo with
ppo, tis); LoRA has that of examples/lora.yaml over addition's, eight times the game's.
"""

from benchmarks.evidence.cells import (
    SEEDS,
    STEPS,
    Cell,
    Overrides,
    run_cells,
    take_no_arguments,
)

EXPERIMENT = "choices"
LAG, NUM_MINIBATCHES = 2, 4
LOSSES = ("gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "reinforce")
OWN_CORRECTION = ("dppo", "dppo_kl", "topr", "vespo")
ADVANTAGES = (
    "dr_grpo",
    "gpg",
    "passk",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "maxrl",
)
LORA_RATES = {"addition": 2.0e-3, "calculator": 4.0e-3, "guess": 2.4e-3}


def methods(game: str) -> dict[str, Overrides]:
    """Return the name and the keys of each choice."""
    unclipped = {"clip_high": None}
    found: dict[str, Overrides] = {"grpo, ppo, tis": {}}
    found |= {f"loss {name}": {"algorithm": {"loss": name} | unclipped} for name in LOSSES}
    found |= {
        f"loss {name}": {"algorithm": {"loss": name, "correction": "none"} | unclipped}
        for name in OWN_CORRECTION
    }
    found |= {f"advantage {name}": {"algorithm": {"advantage": name}} for name in ADVANTAGES}
    found["advantage grpo, std of the batch"] = {"algorithm": {"advantage_std": "batch"}}
    found["advantage gae, a critic"] = {
        "algorithm": {"advantage": "gae"},
        "critic": {"lr": 1.0e-3, "warmup_steps": 3},
    }
    lora = {"rank": 8, "alpha": 16}
    found["lora, rank 8"] = {"lora": lora, "learner": {"lr": LORA_RATES[game]}}
    return found


def cells() -> list[Cell]:
    """Return all runs."""
    return [
        Cell(game, name, LAG, seed, _in_minibatches(overrides))
        for game in STEPS
        for name, overrides in methods(game).items()
        for seed in SEEDS
    ]


def _in_minibatches(overrides: Overrides) -> Overrides:
    learner = {"num_minibatches": NUM_MINIBATCHES, **overrides.get("learner", {})}
    return {**overrides, "learner": learner}


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells())
