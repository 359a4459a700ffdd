"""Recipes with a history, and the runs that a history is made of.

Each recipe is a shortened or complete recipe of configs/experiment on a nano model.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class Recipe:
    """Settings of a recipe and of what it starts from."""

    num_steps: int
    """Number of training steps of a run in the history."""
    overrides: tuple[str, ...]
    """Settings of the run; {home} is a folder for each seed."""
    warm_start: tuple[str, ...]
    """Settings of the warm start."""
    warm_start_folder: str = "sft"
    """Folder of the warm start in {home}, which recipes may share."""
    requires: tuple[str, ...] = ()
    """Recipes that {home} must have a run of."""
    data: str = ""
    """Tool in tools/data that writes {home}/data; empty if the task makes its own examples."""


_GEOMETRY = ("task.data.train=[{home}/data/train.jsonl]", "task.data.eval=[{home}/data/eval.jsonl]")
_NUMBERLINE = ("experiment=numberline_sft_cpu",)
_SHORT = ("experiment=numberline_grpo_cpu", "run.steps=12", "batch.group_size=4")

RECIPES: Mapping[str, Recipe] = {
    "quickstart": Recipe(num_steps=50, overrides=("experiment=numberline_grpo_cpu",), warm_start=_NUMBERLINE),
    "geometry": Recipe(
        num_steps=120,
        overrides=("experiment=geometry_grpo_cpu", *_GEOMETRY),
        warm_start=("experiment=geometry_sft_cpu", *_GEOMETRY),
        warm_start_folder="geometry_sft",
        data="make_geometry",
    ),
    "numberline_short": Recipe(num_steps=12, overrides=_SHORT, warm_start=_NUMBERLINE),
    "distill": Recipe(
        num_steps=12,
        overrides=(*_SHORT, "algo=distill", "distill.teacher={home}/quickstart/final"),
        warm_start=_NUMBERLINE,
        requires=("quickstart",),
    ),
}
