"""The texts below fields are read when somebody asks, and are in the JSON schema."""

from typing import Any

from pydantic import Field
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import Section
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.field_docs import field_docs
from tinkermq.schemas.wire.message import Message


class Parent(Message):
    """A message with texts."""

    first: int = 0
    """The first,
    on two lines."""
    second: int = 0
    "In other quotes."
    third: int = Field(default=0, ge=0)


class Child(Parent):
    """A message that says more of one field, and has one more."""

    second: int = 1
    """Another meaning."""
    fourth: int = 0
    """Its own."""


def test_each_field_has_the_text_below_it_also_an_inherited_one() -> None:
    assert field_docs(Parent) == {
        "first": "The first,\non two lines.",
        "second": "In other quotes.",
        "third": "",
    }
    assert field_docs(Child) == {
        **field_docs(Parent),
        "second": "Another meaning.",
        "fourth": "Its own.",
    }


def test_the_schema_of_a_configuration_tells_them_at_every_depth() -> None:
    schema = JobConfig.model_json_schema()
    learner = schema["$defs"]["LearnerConfig"]["properties"]
    assert (
        learner["lr"]["description"]
        == field_docs(JobConfig.model_fields["learner"].annotation)["lr"]
    )
    assert schema["properties"]["seed"]["description"]


def test_a_class_that_has_no_file_has_no_texts() -> None:
    made: dict[str, Any] = {"Section": Section}
    exec("class Made(Section):\n    one: int = 0\n    '''Text.'''\n", made)
    assert field_docs(made["Made"]) == {"one": ""}
    assert "description" not in made["Made"].model_json_schema()["properties"]["one"]


def test_making_a_class_reads_no_source() -> None:
    """pydantic would read the module of each for its texts, in every process that starts."""
    assert not any(
        model.model_config.get("use_attribute_docstrings") for model in (JobRecord, JobConfig)
    )
