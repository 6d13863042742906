"""A job's page offers what the job can do."""

import pytest
from tinkermq.actors.gateway.data.overview import allowed_actions
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record


@pytest.mark.parametrize(
    ("kind", "state", "stop", "offered"),
    [
        ("train", "RUNNING", "no", {"checkpoint", "pause", "stop", "stop_now"}),
        ("sft", "RUNNING", "no", {"checkpoint", "pause", "stop", "stop_now"}),
        ("train", "RUNNING", "drain", {"stop_now"}),
        ("train", "PAUSED", "no", {"checkpoint", "resume", "stop", "stop_now"}),
        ("infer", "RUNNING", "no", {"stop", "stop_now"}),
        ("train", "COMPLETED", "no", {"resume", "archive", "delete"}),
    ],
)
def test_a_job_offers_what_its_state_and_kind_allow(
    kind: str, state: str, stop: str, offered: set[str]
) -> None:
    changes = {"kind": kind, "state": state, "stop": stop, "configured": True}
    can = allowed_actions(new_record(JobScope("local", "a")).model_copy(update=changes))
    assert {name for name, may in can.items() if may} - {"scale", "prioritize"} == offered


def test_an_archived_job_can_be_brought_back_or_deleted_and_nothing_else() -> None:
    ended = new_record(JobScope("local", "a"), state="COMPLETED", archived=1.0)
    assert {name for name, may in allowed_actions(ended).items() if may} == {"unarchive", "delete"}
