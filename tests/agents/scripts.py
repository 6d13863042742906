"""What a scripted model says to agent programs: a tool call, another, and an end."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tinkermq.schemas.model_apis.canonical import ModelMessage

THOUGHT = "<think>\nLet me think about it.\n</think>\n\n"
PROMPT = "How much is x?"


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as a model writes it, with more spaces than a JSON library does."""
    told = json.dumps(arguments).replace('": ', '":  ')
    return f'<tool_call>\n{{"name": "{name}", "arguments": {told}}}\n</tool_call>'


@dataclass(frozen=True)
class ScriptedTurn:
    """One answer, which is given once in a history: where `words` stand there, it was."""

    words: str
    rest: str
    needs: str = ""
    """A tool without which it is not said."""

    @property
    def text(self) -> str:
        """What the model says."""
        return f"{THOUGHT}  {self.words}\n\n{self.rest}"


def calling(words: str, name: str, *calls: dict[str, Any]) -> ScriptedTurn:
    """Return a turn that calls a tool, perhaps several times."""
    return ScriptedTurn(words, "\n".join(call(name, **arguments) for arguments in calls), name)


SEARCH = calling("I will look.", "search", {"query": "x"})


@dataclass(frozen=True)
class Script:
    """The turns of one program, in order, and its last words."""

    turns: Sequence[ScriptedTurn]
    end: str = "It is 7."
    in_order: bool = False
    """For a program that forgets: one turn after the other, whatever stands in the history."""

    def say(self, messages: Sequence[ModelMessage], tools: Sequence[Any], number: int = 0) -> str:
        """Return the answer to a history, `number` answers after the first."""
        if self.in_order:
            return self.at(number)
        names = {tool["function"]["name"] for tool in tools}
        return self.next("\n".join(message.text for message in messages), names)

    def at(self, number: int) -> str:
        """Return the answer behind `number` answers, of a script that is said in order."""
        return self.turns[number].text if number < len(self.turns) else self.end

    def next(self, said: str, names: Collection[str]) -> str:
        """Return the answer behind a history as one text, with tools of these names."""
        for turn in self.turns:
            if turn.words not in said and (not turn.needs or turn.needs in names):
                return turn.text
        return self.end


def shell(name: str, key: str, **more: Any) -> Script:
    """Return the script of a program whose tool is a shell."""
    return Script(
        [
            calling("I will look.", name, {key: "ls", **more}),
            calling("Now I write it.", name, {key: "echo 7 > answer.txt", **more}),
        ]
    )


MINI = [
    calling("I will look.", "bash", {"command": "cat adding.py"}),
    calling("It takes away.", "bash", {"command": "sed -i 's/one - other/one + other/' adding.py"}),
    calling("I am done.", "bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
]
SCRIPTS = {
    "search": Script([SEARCH]),
    "three": Script([calling("I will look thrice.", "search", *({"query": q} for q in "xyz"))]),
    "long": Script(
        [calling(f"I will look for {q}.", "search", {"query": q}) for q in "xyzw"],
        in_order=True,
    ),
    "handoff": Script([calling("Over to you.", "transfer_to_helper", {}), SEARCH]),
    "as_tool": Script([calling("I will ask.", "ask_helper", {"input": "what is x?"}), SEARCH]),
    "code": Script(
        [
            ScriptedTurn(
                "I will look.", '<code>\nfound = search(query="x")\nprint(found)\n</code>'
            ),
            ScriptedTurn("Now I know.", '<code>\nfinal_answer("7")\n</code>'),
        ]
    ),
    "final": Script([SEARCH, calling("Now I know.", "final_answer", {"answer": "7"})]),
    "codex": shell("exec_command", "cmd"),
    "compacted": Script(
        [
            calling("I will count.", "exec_command", {"cmd": "seq 1 5000"}),
            calling("I will look.", "exec_command", {"cmd": "ls"}),
            ScriptedTurn("I have counted up to 5000; 7 is still to be written down.", ""),
            calling("Now I write it.", "exec_command", {"cmd": "echo 7 > answer.txt"}),
        ],
        in_order=True,
    ),
    "calculate": Script([calling("I will calculate.", "calculate", {"expression": "1 + 6"})]),
    "opencode": shell("bash", "command", description="look around"),
    "pi": shell("bash", "command"),
    "rejected": Script([ScriptedTurn("I think about it.", ""), *MINI], in_order=True),
    "mini": Script(MINI),
}
