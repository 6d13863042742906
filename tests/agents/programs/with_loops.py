"""Simple loops over a model with OpenAI's and Anthropic's clients, as many evaluators have them.

Usage: with_loops.py MODEL ROOT, where ROOT is the address without /v1.
"""

import sys

from anthropic import Anthropic
from openai import OpenAI


def main() -> None:
    model, root = sys.argv[1:]
    openai, anthropic = OpenAI(base_url=f"{root}/v1"), Anthropic(base_url=root)
    asked = [{"role": "user", "content": "What is 2 + 2?"}]
    for _ in range(2):
        chat = openai.chat.completions.create(
            model=model, messages=asked, temperature=0, max_tokens=32_000, reasoning_effort="low"
        )
        said = chat.choices[0].message.content or "nothing"
        asked += [{"role": "assistant", "content": said[:20]}, {"role": "user", "content": "Sure?"}]
    likely = openai.chat.completions.create(
        model=model,
        messages=asked[:1],
        max_tokens=1,
        logprobs=True,
        top_logprobs=5,
        logit_bias={"65": 5, "66": 5},
    )
    print(likely.choices[0].logprobs.content[0].top_logprobs[0].token)
    print(openai.responses.create(model=model, input="Hi", text={"verbosity": "low"}).output_text)
    told = {"model": model, "messages": asked[:1]}
    print(anthropic.messages.count_tokens(**told).input_tokens)
    with anthropic.messages.stream(**told, max_tokens=32_000) as stream:
        print("".join(stream.text_stream))
    off = anthropic.messages.create(**told, max_tokens=64, thinking={"type": "disabled"})
    print(off.stop_reason)


main()
