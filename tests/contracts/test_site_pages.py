"""Statements of the documentation that can be compared with the code: quoted messages, presets of
algorithms, tables of recipes, names of the Python API.
"""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.tasks.vqa import ANSWER
from megatron_rl_tools.docs import recipes
from megatron_rl_tools.docs.configuration import format_literal
from tests.conftest import ROOT
from tests.contracts.test_configs import EXPERIMENTS, settings_of
from tests.support.message_templates import collect_templates, find_missing

DOCS = ROOT / "docs"
PRESETS = sorted(path.stem for path in (ROOT / "configs" / "algo").glob("*.yaml"))


def quoted_messages() -> list[str]:
    return re.findall(r"^```text\n(.*?)\n```", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def templates() -> str:
    texts = collect_templates([ROOT / name for name in ("megatron_rl", "launch", "sandbox")])
    return "\n".join(" ".join(line.split()) for line in texts.splitlines())


def test_a_quoted_message_exists_in_the_code(templates: str) -> None:
    messages = quoted_messages()
    assert len(messages) >= 35
    assert {message: missing for message in messages if (missing := find_missing(message, templates))} == {}


@pytest.mark.parametrize(
    "message",
    [
        "...: no such setting; ... did you mean ...?", "run.dir=...: in use by another run (...); choose another folder",
        "... rollouts failed, above run.max_failed=...",
    ],
)  # fmt: skip
def test_a_changed_message_is_noticed(message: str, templates: str) -> None:
    assert find_missing(message, templates)


def sections() -> dict[str, str]:
    text = (DOCS / "algorithms.md").read_text()
    return dict(re.findall(r"^## algo=(\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def test_every_algorithm_has_a_section() -> None:
    assert sorted(sections()) == PRESETS
    assert {settings_of(f"algo={name}", "model.path=x", "run.dir=y", "task=number_line").algo.name for name in sections()} == set(
        ALGORITHMS
    )


def value_at(settings: object, key: str) -> object:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_section_states_paper_and_preset(name: str) -> None:
    """The section names the paper of the preset's comment, and every value that the preset changes;
    each stated value is the one that the preset composes to.
    """
    section, preset = sections()[name], (ROOT / "configs" / "algo" / f"{name}.yaml").read_text()
    assert f"`configs/algo/{name}.yaml`" in section and "**When to use**" in section and re.search(r"^    \S", sections()["grpo"], re.M)
    assert set(re.findall(r"\b\d{4}\.\d{5}\b", preset)) <= set(re.findall(r"\b\d{4}\.\d{5}\b", section))
    _, _, listed = section.partition("sets ")
    stated = dict(re.findall(r"`((?:algo|batch|filter|critic)\.\w+)=([^`\s]+)`", listed.partition("**When to use**")[0]))
    composed, plain = (
        settings_of(f"algo={name}", "model.path=x", "run.dir=y", "task=number_line"),
        settings_of("model.path=x", "run.dir=y", "task=number_line"),
    )
    assert {key: format_literal(value_at(composed, key)) for key in stated} == stated
    keys = [f"{group}.{key}" for group in ("algo", "batch", "filter", "critic") for key in type(value_at(plain, group)).__annotations__]
    changed = {key for key in keys if key != "algo.name" and value_at(composed, key) != value_at(plain, key)}
    assert changed <= set(stated)


def test_the_memory_table_is_that_of_the_plan() -> None:
    text = recipes.DOCUMENT.read_text()
    table = recipes.render_memory([recipes.plan(name) for name in recipes.gpu_recipes()])
    assert recipes.replace_tables(text, {"memory": table}) == text
    assert recipes.gpu_recipes() == [name for name in EXPERIMENTS if not name.endswith("_cpu")]
    outdated = re.sub(r"\d+\.\d of", "1.0 of", text, count=1)
    assert recipes.replace_tables(outdated, {"memory": table}) != outdated


@pytest.mark.parametrize("name", ["vqa_3b_1gpu"])
def test_the_changes_of_a_recipe_are_those_of_the_plan(name: str) -> None:
    """The row of this recipe is up to date; `tools/docs/recipes.py --check` checks all rows."""
    row = recipes.render_changes([recipes.plan(name)]).splitlines()[-1]
    assert row in recipes.DOCUMENT.read_text() and "GB" in row


def test_judges_take_the_documented_gpus() -> None:
    text = recipes.DOCUMENT.read_text()
    for judge in ("text", "vision"):
        config = (ROOT / "configs" / "judge" / f"{judge}.yaml").read_text()
        size = re.search(r"--tensor-parallel-size (\d+)", config)[1]
        rows = [line for line in text.splitlines() if f"configs/judge/{judge}.yaml" in line]
        assert len(rows) == 1 and rows[0].split("|")[3].strip().startswith(f"{size}, ")
        for name in re.findall(r"`(\w+)`", rows[0].split("|")[1]):
            composed = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text()
            assert name in EXPERIMENTS
            assert f"/judge: {judge}" in composed or re.search(r"- (codev|pyvision)_\w+", composed), name


def imported_names() -> list[tuple[str, str]]:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "api.md").read_text(), re.MULTILINE | re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    return sorted({(str(node.module), each.name) for node in nodes for each in node.names if str(node.module).startswith("megatron_rl")})


def test_names_of_the_python_api_can_be_imported() -> None:
    """Every import of the page works, and so does every dotted name in its tables."""
    found = imported_names()
    assert len(found) >= 12
    named = re.findall(r"`(megatron_rl\.[\w.]+)\.(\w+)", (DOCS / "api.md").read_text())
    assert len(named) >= 6
    for module, name in [*found, *named]:
        assert hasattr(importlib.import_module(module), name), (module, name)


def test_the_script_that_draws_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of docs/your_data.md draws 80 and 20 pictures that show the answer, in
    the folders that the recipe reads.
    """
    script, client = re.findall(r"^```python\n(.*?)^```", (DOCS / "your_data.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "draw.py", "exec"), {"__name__": "__main__"})
    compile(client, "ask.py", "exec")
    rgb = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
    for split, count in (("train", 80), ("eval", 20)):
        header, *rows = (tmp_path / "runs/colors" / split / "metadata.csv").read_text().splitlines()
        assert header == "file_name,question,answer" and len(rows) == count
        for row in rows:
            name, _, color = row.split(",")
            drawn = {each for _, each in Image.open(tmp_path / "runs/colors" / split / name).getcolors()}
            assert drawn == {(255, 255, 255), rgb[color]}
    data = settings_of("experiment=vqa_grpo_cpu").task.data
    assert (data.train, data.eval) == (["runs/colors/train"], ["runs/colors/eval"])
    (transcript,) = re.findall(r"^```json\n(.*?)\n```", (DOCS / "your_data.md").read_text(), re.MULTILINE | re.DOTALL)
    assert json.loads(transcript)["messages"][0]["content"].endswith(ANSWER)
