"""What only a teacher reads: where it stands in the first prompt, and what is refused."""

from typing import Any

import numpy as np
import pytest
from tinkermq.actors.rollout.teachers import TeacherContext, with_text
from tinkermq.schemas.wire.errors import DataError

from tests.actors.generator.test_chat import CHATML, chat_of

USER = {"role": "user", "content": "What is 6 * 7?"}


def test_the_text_stands_at_the_end_of_the_users_words() -> None:
    system = {"role": "system", "content": "Answer."}
    assert with_text([system, USER], "It is 42.") == [
        system,
        {"role": "user", "content": "What is 6 * 7?\n\nIt is 42."},
    ]
    image = {"type": "image", "image": b"..."}
    (shown,) = with_text([{"role": "user", "content": [image]}], "It is 42.")
    assert shown["content"] == [image, {"type": "text", "text": "\n\nIt is 42."}]
    assert with_text([system], "It is 42.")[-1] == {"role": "user", "content": "It is 42."}


def test_the_teachers_prompt_is_the_policys_with_the_text_in_it() -> None:
    chat = chat_of(CHATML)
    own = chat.first_prompt([USER])
    context = TeacherContext("solution", 40, chat)
    prompt = context.prompt([USER], [], len(own), {"solution": "It is 42."})
    wanted = chat.first_prompt([{"role": "user", "content": "What is 6 * 7?\n\nIt is 42."}])
    np.testing.assert_array_equal(prompt, wanted)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"correct": 1.0}, "the game's `info` has None under this name"),
        ({"solution": 42}, "the game's `info` has 42 under this name"),
        ({"solution": ""}, "the game's `info` has '' under this name"),
        ({"solution": "It is " + "4" * 99}, "tokens longer than the prompt"),
    ],
)
def test_a_game_that_tells_no_text_or_too_long_a_one_is_named(
    info: dict[str, Any], message: str
) -> None:
    chat = chat_of(CHATML)
    with pytest.raises(DataError, match=message):
        TeacherContext("solution", 40, chat).prompt([USER], [], 20, info)
