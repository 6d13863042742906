"""Write a tiny random model to try things with: `python -m tinkermq.actors.make_tiny FOLDER`.

It is a real model of a real class that knows nothing; a CPU core trains it in seconds.
"""

import argparse
from pathlib import Path
from typing import get_args

from .policy import tiny_models

_WITH_TOOLS = """
{%- for tool in tools or [] -%}{{ tool['function']['name'] + ' ' }}{%- endfor -%}
{%- for message in messages -%}
  {{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
  {%- for call in message['tool_calls'] or [] -%}
    <tool_call>{"name": "{{ call['function']['name'] }}", "arguments":{{ ' ' }}
    {{- call['function']['arguments'] | tojson }}}</tool_call>
  {%- endfor -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
"""Names of tools first; calls as Hermes models write them, so that agent programs may make some."""


def main() -> None:
    """Make the folder that the command line names."""
    options = argparse.ArgumentParser(
        prog="python -m tinkermq.actors.make_tiny", description="Write a tiny random model."
    )
    options.add_argument("folder", type=Path)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--layers", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    kinds = (*get_args(tiny_models.TinyKind), *get_args(tiny_models.TinyVisionKind))
    options.add_argument("--kind", choices=kinds, default="qwen3", help="qwen2_vl and on see")
    options.add_argument(
        "--tools", action="store_true", help="its template has tools and their calls"
    )
    given = options.parse_args()
    if given.kind in get_args(tiny_models.TinyVisionKind):
        if given.tools:
            options.error(f"--tools: a model of --kind {given.kind} has no template with tools")
        size = {"width": given.width, "layers": given.layers}
        tiny_models.save_tiny_vision_model(given.folder, kind=given.kind, seed=given.seed, **size)
        return
    tiny_models.save_tiny_model(
        given.folder,
        width=given.width,
        layers=given.layers,
        seed=given.seed,
        kind=given.kind,
        template=_WITH_TOOLS if given.tools else tiny_models.CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    main()
