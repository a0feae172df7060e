"""What the project says of itself is the same in all of its files."""

from __future__ import annotations

import re

import pytest
from support.pages import ROOT

tomllib = pytest.importorskip("tomllib")  # Python 3.11
yaml = pytest.importorskip("yaml")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"]
    assert citation["license"] == project()["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in project()["authors"]]


def test_every_python_that_is_claimed_is_run() -> None:
    run = workflow("ci")["jobs"]["run"]
    tried = run["strategy"]["matrix"]["python"]
    claimed = [m[1] for text in project()["classifiers"]
               if (m := re.search(r"Python :: (3\.\d+)$", text))]
    assert tried == claimed
    assert project()["requires-python"] == f">={claimed[0]}"
    assert "bash .ci/run" in [step.get("run") for step in run["steps"]]


def test_a_release_passes_what_a_change_must_pass_and_needs_no_password() -> None:
    jobs = workflow("release")["jobs"]
    steps = jobs["build"]["steps"]
    assert "bash .ci/run" in [step.get("run") for step in steps]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_reports_ask_for_the_doctor() -> None:
    place = ROOT / ".github"
    forms = [*place.glob("ISSUE_TEMPLATE/[!c]*.yml"), place / "pull_request_template.md"]
    assert len(forms) == 3
    for form in forms:
        assert "tilewise doctor" in form.read_text(), form.name
