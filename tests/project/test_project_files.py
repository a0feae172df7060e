"""What the project says of itself is the same in all of its files."""

from __future__ import annotations

import re

import pytest
from support.pages import ROOT, script

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


def test_a_tag_of_another_version_is_not_released() -> None:
    tags, version = script("check_tag"), project()["version"]
    assert set(tags.versions().values()) == {version}
    assert not tags.complaints(f"v{version}")
    assert len(tags.complaints("v9.9.9")) == len(tags.complaints(version)) == len(tags.PLACES)
    steps = [step.get("run", "") for step in workflow("release")["jobs"]["build"]["steps"]]
    assert 'python scripts/check_tag.py "$GITHUB_REF_NAME"' in steps


def test_every_tool_of_a_release_has_its_version_fixed() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {line.partition("==")[0] for line in lines}
    steps = [step.get("run", "") for step in workflow("release")["jobs"]["build"]["steps"]]
    tools = next(step for step in steps if step.startswith("pip install")).split()[4:]
    assert {"build", "hatchling", "twine"} == set(tools) <= fixed


def test_reports_ask_for_the_doctor() -> None:
    place = ROOT / ".github"
    forms = [*place.glob("ISSUE_TEMPLATE/[!c]*.yml"), place / "pull_request_template.md"]
    assert len(forms) == 3
    for form in forms:
        assert "tilewise doctor" in form.read_text(), form.name
