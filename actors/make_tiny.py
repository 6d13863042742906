"""Write a tiny random model for experiments: `python -m tinkermq.actors.make_tiny FOLDER`.

It has a real model class and random weights; a CPU core trains it in seconds.
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
"""Names of tools first; calls are in the format of Hermes, so that agent programs can call
tools."""


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tinkermq.actors.make_tiny", description="Write a tiny random model."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    kinds = (*get_args(tiny_models.TinyKind), *get_args(tiny_models.TinyVisionKind))
    parser.add_argument(
        "--kind", choices=kinds, default="qwen3", help="kinds from qwen2_vl on take images"
    )
    parser.add_argument(
        "--tools", action="store_true", help="make a template that has tools and their calls"
    )
    options = parser.parse_args()
    if options.kind in get_args(tiny_models.TinyVisionKind):
        if options.tools:
            parser.error(f"--tools: a model of --kind {options.kind} has no template with tools")
        size = {"width": options.width, "layers": options.layers}
        tiny_models.save_tiny_vision_model(
            options.folder, kind=options.kind, seed=options.seed, **size
        )
        return
    tiny_models.save_tiny_model(
        options.folder,
        width=options.width,
        layers=options.layers,
        seed=options.seed,
        kind=options.kind,
        template=_WITH_TOOLS if options.tools else tiny_models.CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    main()
