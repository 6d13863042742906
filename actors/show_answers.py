"""Answer questions of a dataset with two models.

    python -m tinkermq.actors.show_answers MODEL OTHER DATA COUNT

The models are folders; an adapter is merged into its base. Each of the first COUNT rows of a
parquet file with a column `prompt` becomes a line of JSON: the last message's text and the two
answers, decoded greedily, on one line each.
"""

import argparse
import json
import sys
from typing import Any, cast

MAX_TOKENS = 24


def answers(path: str, prompts: list[list[dict[str, str]]]) -> list[str]:
    """Return a model's greedy answers."""
    import torch

    from ..schemas.config.job import ModelConfig
    from .policy.chat import open_chat
    from .policy.model_folder import load_causal_lm

    chat = open_chat(ModelConfig(path=path))
    model = cast("Any", load_causal_lm(path, dtype=torch.float32))
    tokenizer = cast("Any", chat.tokenizer)
    decoded: list[str] = []
    for prompt in prompts:
        ids = torch.tensor(chat.first_prompt(cast("Any", prompt)))[None].long()
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
        )
        text: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        decoded.append(" ".join(text.split()))
    return decoded


def main() -> None:
    """Read the rows and print a line for each."""
    import pyarrow.parquet

    parser = argparse.ArgumentParser(prog="python -m tinkermq.actors.show_answers")
    parser.add_argument("models", nargs=2)
    parser.add_argument("data")
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    table = cast("Any", pyarrow.parquet).read_table(options.data, columns=["prompt"])
    prompts = [row["prompt"] for row in table.slice(0, options.count).to_pylist()]
    both = [answers(path, prompts) for path in options.models]
    for prompt, first, second in zip(prompts, *both, strict=True):
        sys.stdout.write(json.dumps([prompt[-1]["content"], first, second]) + "\n")


if __name__ == "__main__":
    main()
