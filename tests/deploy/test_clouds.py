"""The examples for SkyPilot and dstack: what they start is there, and starts."""

import shlex
from typing import Any

import yaml
from tinkermq.schemas.wire.subjects import token

from tests.clients.command import tinkermq
from tests.support.configs import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "clouds"
SKYPILOT: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
DSTACK: dict[str, Any] = yaml.safe_load((FOLDER / "dstack.yaml").read_text())


def test_both_start_a_node_whose_name_is_one() -> None:
    for command in (SKYPILOT["run"], *DSTACK["commands"]):
        words = shlex.split(command)
        assert [words[0], words[1].rpartition("/")[2], *words[2:4]] == [
            *("exec", "tinkermq", "node", "--name")
        ]
        prefix = words[4].partition("-$(")[0]
        assert token(f"{prefix}-host-0-1", what="node name") == f"{prefix}-host-0-1"
    assert "--name NAME" in tinkermq("node", "--", "--help").out


def test_files_of_secrets_are_where_their_variables_say() -> None:
    variables = dict(one.split("=", 1) for one in DSTACK["env"])
    assert variables == SKYPILOT["envs"]
    mounted = set(SKYPILOT["file_mounts"])
    assert mounted == {variables["TINKERMQ_CA"], variables["TINKERMQ_CREDENTIALS"]}
    assert {one.rpartition(":")[2] for one in DSTACK["files"]} == mounted
    sources = {one.rpartition(":")[0].removeprefix("../../") for one in DSTACK["files"]}
    assert sources == {one.removeprefix("./") for one in SKYPILOT["file_mounts"].values()}
