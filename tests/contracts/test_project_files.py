"""Workflows, templates, hooks, citation file and changelog: they parse, and the scripts, programs
and versions that they name exist.
"""

import re
import runpy
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.documented_commands import InvalidCommand, check_command, split_words

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
NAMES = (".pre-commit-config.yaml", "CITATION.cff", "SECURITY.md", "AGENTS.md", "CHANGELOG.md")
HOSTED = [*WORKFLOWS, *FORMS, *(ROOT / name for name in NAMES)]
ACTIONS = re.compile(r"actions/(checkout|setup-python|upload-artifact|upload-pages-artifact|deploy-pages)@v\d+")
SITE = ".venv/bin/mkdocs build --strict --site-dir runs/site"


def steps_of(workflow: str) -> list[dict[str, Any]]:
    """Return the steps of all jobs."""
    return [step for job in yaml.safe_load(workflow)["jobs"].values() for step in job["steps"]]


def commands_of(workflow: str) -> list[str]:
    return [line for step in steps_of(workflow) for line in step.get("run", "").splitlines()]


def check_workflow(workflow: str, config: pytest.Config) -> None:
    """Raise InvalidCommand if a step starts something that does not exist, or uses an action of
    somebody else.
    """
    for step in steps_of(workflow):
        if "uses" in step and not ACTIONS.fullmatch(step["uses"]):
            raise InvalidCommand(f"{step['uses']}: is not an action of the platform itself")
    for line in commands_of(workflow):
        if line != SITE:
            if split_words(line)[0] != "bash":
                raise InvalidCommand(f"{line}: is not a script of this repository")
            check_command(line, config)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_starts_what_exists(path: Path, pytestconfig: pytest.Config) -> None:
    check_workflow(path.read_text(), pytestconfig)
    assert all("timeout-minutes" in job for job in yaml.safe_load(path.read_text())["jobs"].values())


def test_what_the_workflows_run() -> None:
    found = {path.stem: commands_of(path.read_text()) for path in WORKFLOWS}
    assert found == {
        "ci": ["bash .ci/run"],
        "pull_request": ["bash launch/install.sh", "bash tests/lint.sh", "bash tests/run.sh --quick"],
        "site": ["bash launch/install.sh", SITE],
    }


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("run: bash .ci/walk", "cannot be started"),
        ("run: bash tests/run.sh --quik", "--quik"),
        ("run: pip install ruff", "not a script"),
        ("uses: somebody/checkout@v4", "not an action"),
    ],
)
def test_a_wrong_step_is_noticed(step: str, said: str, pytestconfig: pytest.Config) -> None:
    with pytest.raises(InvalidCommand, match=said):
        check_workflow(f"jobs:\n  one:\n    steps:\n      - {step}\n", pytestconfig)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_complete(path: Path) -> None:
    """The keys that the platform requires are there, and every field has an id of its own."""
    form = yaml.safe_load(path.read_text())
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert form["name"] and form["description"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in fields)


def test_hooks_start_pinned_programs() -> None:
    """Every hook is local and starts a program that the lock installs."""
    lock = (ROOT / "requirements" / "cpu.txt").read_text()
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program = split_words(hook["entry"])[0].removeprefix(".venv/bin/")
        assert hook["language"] == "system" and re.search(rf"^{program}(-py)?==", lock, re.MULTILINE), program


@pytest.mark.parametrize("path", HOSTED, ids=lambda path: path.name)
def test_no_address_is_named(path: Path) -> None:
    """No registry, no other host and no e-mail address."""
    text = path.read_text()
    assert "://" not in text and not re.search(r"[\w.]+@[\w-]+\.\w", text)


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    package = setup.call_args.kwargs
    assert (str(citation["version"]), citation["license"]) == (package["version"], package["license"])
    assert citation["authors"] and citation["title"].startswith(f"{package['name']}: ") and citation["cff-version"] == "1.2.0"


def test_the_changelog_is_sorted() -> None:
    """Newest first: what is unreleased, then one section a day with the usual headings."""
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *days = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "Unreleased" and days == sorted(days, reverse=True)
    assert all(date.fromisoformat(day) for day in days)
    assert {*re.findall(r"^### (.*)$", text, re.MULTILINE)} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_diagram_stands_alone() -> None:
    """The SVG file parses, has a title and a description, and loads nothing from elsewhere."""
    path = ROOT / "docs" / "assets" / "loop.svg"
    root = ElementTree.parse(path).getroot()
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags[:3] == ["svg", "title", "desc"] and not {"script", "image", "foreignObject"} & {*tags}
    text = path.read_text()
    assert text.count("://") == 1, "the namespace"
    assert "prefers-color-scheme: dark" in text and "@import" not in text and "@font-face" not in text
