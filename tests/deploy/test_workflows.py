"""The files in .github/, and those that name the version, say what the repository has."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.support.configs import REPOSITORY

GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(file for file in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text())["jobs"]


def targets(text: str) -> set[str]:
    """Return the make targets that a shell script, or a job with its matrix, calls."""
    calls = re.findall(r"\bmake ((?:[a-z-]+(?:=\S+)? ?|[A-Z]+=\S+ ?)+)", text)
    return {word for call in calls for word in call.split() if re.fullmatch(r"[a-z-]+", word)}


def called(job: dict[str, Any]) -> set[str]:
    """Return the make targets of a job, those of its matrix included."""
    found: set[str] = set()
    for target in job.get("strategy", {}).get("matrix", {}).get("target", [""]):
        for step in job["steps"]:
            script = step.get("run", "").replace("${{ matrix.target }}", target)
            found |= targets(re.sub(r"\${{.*?}}", "X", script))
    return found


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_calls_make_targets_that_exist_with_few_permissions(file: Any) -> None:
    workflow = yaml.safe_load(file.read_text())
    rules = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    assert set.union(*map(called, workflow["jobs"].values())) - rules == set()
    for job in workflow["jobs"].values():
        assert not set(job.get("needs", "").split()) - set(workflow["jobs"])


def test_ci_calls_what_the_script_for_other_machines_calls_on_every_python() -> None:
    workflow = jobs("ci")
    script = targets((REPOSITORY / ".ci" / "run").read_text())
    assert script <= set.union(*map(called, workflow.values()))
    offered = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert set(offered) <= set(workflow["core"]["strategy"]["matrix"]["python"])


def test_a_release_is_checked_built_once_and_published_without_a_token() -> None:
    workflow = jobs("release")
    runs = " ".join(step.get("run", "") for step in workflow["build"]["steps"])
    assert "twine check" in runs
    assert {"lint", "test", "sbom"} <= called(workflow["build"])
    assert workflow["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(workflow)
    assert "secrets." not in str(workflow)


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_an_issue_form_asks_for_the_doctor_report(file: Any) -> None:
    form = yaml.safe_load(file.read_text())
    assert {"name", "description", "body"} <= set(form)
    assert "tinkermq doctor --json" in file.read_text()
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
