"""Writes the tables of docs/recipes.md from the memory plan of each GPU recipe.

    python -m megatron_rl_tools.docs.recipes            # update the tables in docs/recipes.md
    python -m megatron_rl_tools.docs.recipes --check    # exit code 1: the tables are out of date

The tables are between the comments `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import Settings
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.memory_plan.gpu_memory import MemoryPlan, plan_gpu_memory
from megatron_rl.memory_plan.gpu_specs import GB, GPUS_PER_NODE
from megatron_rl.memory_plan.step_time import estimate_step_seconds, make_step_time_inputs
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.preflight.settings import check_sizes
from megatron_rl.registry import has_critic, uses_sandbox

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "recipes.md"
NUM_CHANGES = 3


@dataclass(slots=True, frozen=True)
class PlannedRecipe:
    """A GPU recipe with its memory plan."""

    name: str
    settings: Settings
    plan: MemoryPlan

    @property
    def margin(self) -> float:
        """Unplanned fraction of the usable memory of a GPU."""
        return 1 - self.plan.peak_bytes / self.plan.usable_bytes


def gpu_recipes() -> list[str]:
    """Return the names of the experiments that are planned for GPUs, sorted."""
    names = (path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
    return sorted(name for name in names if not name.endswith("_cpu"))


def plan(name: str, *overrides: str) -> PlannedRecipe:
    """Compose a recipe with overrides and plan its memory.

    Raises ValueError if a run would refuse the settings.
    """
    settings = compose_settings([f"experiment={name}", *overrides])
    model = load_known_spec(settings.model.path)
    check_sizes(settings, model, settings.plan.world_size)
    planned = plan_gpu_memory(
        model, settings, world_size=settings.plan.world_size, has_values=has_critic(settings),
        uses_sandbox=uses_sandbox(settings),
    )  # fmt: skip
    return PlannedRecipe(name, settings, planned)


def candidate_changes(recipe: PlannedRecipe) -> list[tuple[str, ...]]:
    """Return the changes of settings that may reduce the memory of a GPU, each as overrides."""
    s = recipe.settings
    half = max(1, max(s.batch.micro_batch_tokens, s.engine.max_model_len) // 2)
    changes: list[tuple[str, ...]] = [
        (f"engine.gpu_memory_utilization={s.engine.gpu_memory_utilization - 0.1:.2f}",),
        (f"batch.micro_batch_tokens={half}", f"engine.max_model_len={min(half, s.engine.max_model_len)}"),
        (f"model.max_pixels={s.model.max_pixels // 2}",),
        ("parallel.log_probs_chunk_size=512",) if s.parallel.log_probs_chunk_size > 512 else (),
        ("parallel.recompute=full",) if s.parallel.recompute != "full" else (),
        ("parallel.recompute_num_layers=0",) if s.parallel.recompute_num_layers else (),
        ("parallel.offload_params=true",) if not s.parallel.offload_params else (),
        ("parallel.offload_optimizer=true",) if not s.parallel.offload_optimizer else (),
        ("lora.rank=64",) if s.lora.rank == 0 else (f"lora.rank={s.lora.rank // 2}",),
    ]
    if s.engine.max_model_len <= half:
        changes[1] = (f"batch.micro_batch_tokens={half}",)
    return [change for change in changes if change]


def best_changes(recipe: PlannedRecipe) -> list[tuple[tuple[str, ...], int]]:
    """Return the single changes that reduce the peak most, with the bytes that each saves."""
    found = []
    for change in candidate_changes(recipe):
        try:
            saved = recipe.plan.peak_bytes - plan(recipe.name, *change).plan.peak_bytes
        except ValueError:  # a combination that a run would refuse
            continue
        if saved >= GB // 10:
            found.append((change, saved))
    return sorted(found, key=lambda each: -each[1])[:NUM_CHANGES]


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def render_memory(recipes: Iterable[PlannedRecipe]) -> str:
    """Return the table of memory, margin and seconds."""
    rows = []
    for each in recipes:
        planned, settings = each.plan, each.settings
        seconds = estimate_step_seconds(make_step_time_inputs(load_known_spec(settings.model.path), settings, planned)).step_total
        host = planned.host.node_bytes(min(planned.world_size, GPUS_PER_NODE))
        rows.append((
            f"`{each.name}`", f"{planned.world_size} {planned.gpu}", f"{planned.peak_bytes / GB:.1f} of {planned.usable_bytes / GB:.1f}",
            f"{each.margin:.1%}", f"{host / GB:.0f}", f"{seconds:.0f}",
        ))  # fmt: skip
    return render_table(("recipe", "GPUs", "GB on a GPU, of the usable", "margin", "GB of host memory per node", "s per step"), rows)


def render_changes(recipes: Iterable[PlannedRecipe]) -> str:
    """Return the table of the settings that reduce the memory most."""
    rows = []
    for each in recipes:
        cells = [f"{' '.join(f'`{word}`' for word in change)}: {saved / GB:.1f} GB" for change, saved in best_changes(each)]
        rows.append((f"`{each.name}`", *cells, *[""] * (NUM_CHANGES - len(cells))))
    return render_table(("recipe", "first", "second", "third"), rows)


def replace_tables(text: str, tables: dict[str, str]) -> str:
    """Return the document with new tables."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(\n<!-- {name}: end -->)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"docs/recipes.md has no place for the table {name}"
        text = pattern.sub(lambda found, table=table: f"{found[1]}\n{table}\n{found[2]}", text)
    return text


def main() -> int:
    """Update or check docs/recipes.md; return the exit code."""
    parser = argparse.ArgumentParser(description="Update the tables of docs/recipes.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the tables are outdated")
    is_check = parser.parse_args().check
    recipes = [plan(name) for name in gpu_recipes()]
    old = DOCUMENT.read_text()
    new = replace_tables(old, {"memory": render_memory(recipes), "changes": render_changes(recipes)})
    if is_check:
        return int(old != new)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
