"""The recipes of the README are a selection of configs/experiment, and their columns equal the
settings and the memory plan. The tables of docs/recipes.md have all of them.
"""

import re
from dataclasses import astuple, dataclass

import pytest

from megatron_rl.config import Settings
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.memory_plan.gpu_memory import plan_gpu_memory
from megatron_rl.memory_plan.gpu_specs import GPU_SPECS
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.registry import has_critic, uses_sandbox
from tests.conftest import ROOT
from tests.contracts.test_configs import EXPERIMENTS, settings_of

README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "recipes.md").read_text()
RESULTS = dict(re.findall(r"^\[(\w+)\]: (?:\.\./)?(benchmarks/results/\S+)$", README + PAGE, re.MULTILINE))
"""Result file of each link."""


@dataclass(frozen=True)
class Facts:
    """Columns of a row, in order."""

    model: str
    hardware: str
    memory: str
    needs: str


def facts_of(name: str) -> Facts:
    """Return what the row of an experiment must contain, computed from its settings."""
    settings = settings_of(f"experiment={name}")
    if name.endswith("_cpu"):
        return Facts("nano", "CPU", "-", needs_of(settings))
    spec, plan = load_known_spec(settings.model.path), settings.plan
    planned = plan_gpu_memory(
        spec, settings, world_size=plan.world_size, has_values=has_critic(settings), uses_sandbox=uses_sandbox(settings)
    )
    peak, usable = max(rank.peak_bytes for rank in planned.ranks) / 1e9, 0.9 * GPU_SPECS[plan.gpu].memory_bytes / 1e9
    model = settings.model.path.removeprefix("Qwen/Qwen2.5-VL-").removeprefix("Qwen/").removesuffix("-Instruct") + (
        " LoRA" if settings.lora.rank else ""
    )
    return Facts(model, f"{plan.world_size} x {plan.gpu.upper()}", f"{peak:.1f} of {usable:.1f}", needs_of(settings))


def needs_of(settings: Settings) -> str:
    """Return the services and packages that the README lists for an experiment."""
    services, task = settings.services, settings.task
    needed = {
        "alfworld": task.name == "alfworld",
        "judge": bool(task.judge.model),
        "listener": task.name == "lewis_speaker" or bool(services.listener.kind),
        "minigrid": isinstance(task.options, GymnasiumOptions) and task.options.id.startswith("MiniGrid-"),
        "sandbox": uses_sandbox(settings),
        "speaker": bool(services.speaker.kind),
    }
    return ", ".join(name for name, is_needed in needed.items() if is_needed) or "-"


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the other cells of each row that begins with the name of an experiment."""
    rows = re.findall(r"^\| `(\w+_(?:cpu|h\d+x\d+|l40s\d+|1gpu\w*))` \|(.*)\|$", text, re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows), "an experiment has two rows"
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


IN_README = rows_of(README)
ON_PAGE = rows_of(PAGE[PAGE.index("## Recipes for CPUs") :])
"""Cells of the recipes for CPUs. Those for GPUs are tested with the site (test_site_pages.py)."""


def test_every_recipe_for_a_cpu_has_a_row() -> None:
    assert sorted(ON_PAGE) == [name for name in EXPERIMENTS if name.endswith("_cpu")]
    assert len(IN_README) >= 12


@pytest.mark.parametrize("name", IN_README)
def test_a_row_states_what_the_recipe_is(name: str) -> None:
    assert IN_README[name][:-1] == list(astuple(facts_of(name)))


@pytest.mark.parametrize("name", ON_PAGE)
def test_a_row_of_the_page_states_what_the_recipe_needs(name: str) -> None:
    assert ON_PAGE[name][0] == needs_of(settings_of(f"experiment={name}"))
    assert name not in IN_README or ON_PAGE[name][-1] == IN_README[name][-1]


@pytest.mark.parametrize("name", sorted(IN_README | ON_PAGE))
def test_the_status_of_a_recipe_has_a_source(name: str) -> None:
    """GPU recipes have not been run. The numbers of CPU recipes occur in the result file that the
    row links to.
    """
    status = (IN_README | ON_PAGE)[name][-1]
    if not name.endswith("_cpu") or name == "alfworld_grpo_cpu":
        assert status in ("not run", "run, not measured")
        return
    cell = re.fullmatch(r"\[([\d.%, ]+)\]\[(\w+)\]", status)
    assert cell, f"{status}: is neither a number with a source nor 'not run'"
    source = (ROOT / RESULTS[cell[2]]).read_text()
    for number in re.findall(r"[\d.]+", cell[1]):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", source), f"{number} is not in {RESULTS[cell[2]]}"


def test_a_wrong_row_is_noticed() -> None:
    """The GPU and its memory come from the settings, so that neither can be edited in the README
    alone.
    """
    facts = facts_of("visual_search_3b_lora_1gpu_24g")
    assert (facts.model, facts.hardware, facts.needs) == ("3B LoRA", "1 x L4", "sandbox")
    peak, usable = map(float, facts.memory.split(" of "))
    assert usable == 21.6 and 0.9 * usable < peak < usable
    assert needs_of(settings_of("experiment=codev_7b_h200x8")) == "judge, sandbox"
    assert needs_of(settings_of("experiment=lewis_speaker_7b_h100x4")) == "listener"
