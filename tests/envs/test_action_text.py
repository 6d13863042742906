"""The action is what stands in the last tag, or the last line."""

import pytest
from tinkermq.envs.reasoning import tagged, tagged_or_last_line


@pytest.mark.parametrize(
    ("text", "inside", "action"),
    [
        ("<action> go </action>", "go", "go"),
        ("I may <action>look</action>, no: <ACTION>take\nit</ACTION>.", "take\nit", "take\nit"),
        ("thinking\ngo north\n\n", None, "go north"),
        ("<action>open", None, "<action>open"),
        ("", None, ""),
    ],
)
def test_an_action_is_found(text, inside, action):
    assert tagged(text, "action") == inside
    assert tagged_or_last_line(text, "action") == action
