"""A text that Linux cannot pass to a program is refused with where the program finds it instead."""

import pytest
from tinkermq.envs.agents.programs.environment import filled
from tinkermq.schemas.config.agent import AgentConfig
from tinkermq.schemas.wire.errors import DataError

LIMIT = 128 * 1024


@pytest.mark.parametrize("prompt", ["x" * LIMIT, "\N{SNOWMAN}" * (LIMIT // 3 + 1), "a\0b"])
def test_a_prompt_that_is_no_argument_is_refused(prompt: str) -> None:
    config = AgentConfig(command=["agent", "{prompt}"])
    with pytest.raises(DataError, match=r"'{prompt}' cannot be passed to a program") as refused:
        filled(config, config.command, prompt)
    assert "$TINKERMQ_TASK" in refused.value.hint
    assert filled(config, config.command, "x" * (LIMIT - 1))[1] == "x" * (LIMIT - 1)
