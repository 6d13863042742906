"""Choosing by name."""

import pytest
from tinkermq.actors.training.sequences import choose
from tinkermq.schemas.wire.errors import ConfigError

TABLE = {"ppo": 1, "gspo": 2}


def test_a_known_name_gives_its_entry():
    assert choose(TABLE, "loss", "gspo") == 2


def test_a_misspelt_name_gives_the_closest():
    with pytest.raises(ConfigError, match="loss=gsppo does not exist") as caught:
        choose(TABLE, "loss", "gsppo")
    assert caught.value.hint == "did you mean gspo?"


def test_a_name_like_no_other_gives_all():
    with pytest.raises(ConfigError) as caught:
        choose(TABLE, "loss", "zzz")
    assert caught.value.hint == "choose one of ppo, gspo"
