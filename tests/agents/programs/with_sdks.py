"""A program that speaks with the model through OpenAI's or Anthropic's own library.

python with_sdks.py chat|responses|messages PROMPT
"""

import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen

from anthropic import Anthropic
from openai import OpenAI

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"name": "search", "description": "Search the library."}


def found(query: str) -> str:
    return f"{query} is 7"


def by_chat(prompt: str) -> str:
    client, history = OpenAI(), [{"role": "user", "content": prompt}]
    tools: Any = [{"type": "function", "function": {**SEARCH, "parameters": QUERY}}]
    while True:
        with client.chat.completions.stream(
            model="policy", messages=history, tools=tools
        ) as stream:
            answer = stream.get_final_completion()
        message = answer.choices[0].message
        history.append(message.model_dump(exclude={"parsed"}, exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = found(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def by_responses(prompt: str) -> str:
    client, previous, given = OpenAI(), None, [{"role": "user", "content": prompt}]
    tools: Any = [{"type": "function", **SEARCH, "parameters": QUERY, "strict": False}]
    while True:
        answer = client.responses.create(
            model="policy", input=given, tools=tools, previous_response_id=previous
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        previous, given = answer.id, []
        for call in calls:
            result = found(**json.loads(call.arguments))
            given.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


def by_messages(prompt: str) -> str:
    client, history = Anthropic(), [{"role": "user", "content": prompt}]
    asked: Any = {"model": "policy", "max_tokens": 1000, "messages": history}
    asked["tools"] = [{**SEARCH, "input_schema": QUERY}]
    while True:
        counted = client.messages.count_tokens(
            model="policy", messages=history, tools=asked["tools"]
        )
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
        read = answer.usage.cache_read_input_tokens or 0
        assert answer.usage.input_tokens + read == counted.input_tokens
        history.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": found(**call.input)}
            for call in calls
        ]
        history.append({"role": "user", "content": results})


def main(mode: str, prompt: str) -> None:
    said = {"chat": by_chat, "responses": by_responses, "messages": by_messages}[mode](prompt)
    headers = {"Authorization": f"Bearer {os.environ['TINKERMQ_EPISODE_KEY']}"}
    body = json.dumps({"reward": float("7" in said)}).encode()
    with urlopen(Request(os.environ["TINKERMQ_EPISODE_URL"] + "/reward", body, headers)) as told:
        assert told.status == 200


main(*sys.argv[1:])
