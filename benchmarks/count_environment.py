"""A class as TRL's environments are written, a tiny model that half knows it, and its rows.

The policy is to count to a number with one call of a tool. The class knows nothing of tinkermq;
the rest makes the model: its tokenizer has one token for each part of a call that never changes.
"""

import json
import random
from pathlib import Path
from typing import Any

from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.warm_start import warm_start

TOKENS = ('<tool_call>{"name": "increment", "arguments": {"step": ', "}}</tool_call>", "Count to ")
TEMPLATE = """
{%- if tools -%}
  {{- '<|system|>' -}}
  {%- for tool in tools -%}{{ tool['function']['name'] }}{%- endfor -%}
  {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|user|>' if message['role'] == 'tool' else '<|' + message['role'] + '|>' -}}
  {{- message['content'] or '' -}}
  {%- for call in message['tool_calls'] or [] -%}
    <tool_call>{"name": "{{ call['function']['name'] }}", "arguments":{{ ' ' }}
    {{- call['function']['arguments'] | tojson }}}</tool_call>
  {%- endfor -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}
"""How TRL finds calls in what the model says."""
NUM_ROWS = 2048
GOALS = range(1, 10)
HABIT = 0.6
"""Share of the demonstrations that add any number."""


class CountEnvironment:
    """Counts; the reward is for the right count at the end."""

    def reset(self, goal: int, **kwargs: Any) -> str | None:
        """Start an episode."""
        self.counter, self.goal = 0, goal
        return None

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        """Judge the count."""
        return float(self.counter == self.goal)


def demonstrations(rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation, in which the number is mostly a guess."""
    goal = rng.choice(GOALS)
    step = rng.choice(GOALS) if rng.random() < HABIT else goal
    return [
        {"role": "system", "content": "increment"},
        {"role": "user", "content": f"Count to {goal}"},
        {"role": "assistant", "content": f"{TOKENS[0]}{step}{TOKENS[1]}"},
        {"role": "user", "content": str(step)},
        {"role": "assistant", "content": "."},
    ]


def model(folder: Path, *, module: str = __name__, steps: int = 400) -> Path:
    """Return the folder of a model that was warm-started on a module's demonstrations."""
    warm_start(module, folder, steps=steps)
    tokenizer: Any = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def rows() -> list[dict[str, Any]]:
    """Return the rows of the data set."""
    rng = random.Random(1)
    goals = [rng.choice(GOALS) for _ in range(NUM_ROWS)]
    return [
        {"prompt": [{"role": "user", "content": f"Count to {goal}"}], "goal": goal}
        for goal in goals
    ]


def write_data(file: Path) -> Path:
    """Write the rows as JSONL."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return file


def in_training_order(num_rows: int) -> list[dict[str, Any]]:
    """Return the rows that the learner trains, in its order: for the peer."""
    given = rows()
    order = DataOrder(0, len(given))
    return [given[order.sample(index) or 0] for index in range(num_rows)]
