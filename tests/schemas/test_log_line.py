"""Log lines are shown as people read them."""

from tinkermq.schemas.metric import readable


def test_a_structured_line_becomes_text_and_others_stay_as_they_are() -> None:
    assert readable("[1, 2]") == "[1, 2]"
    assert readable("{broken") == "{broken"
    assert readable('{"event": "a", "level": "info", "step": 3}') == "info a step=3"
