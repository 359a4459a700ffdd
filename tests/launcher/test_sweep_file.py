"""The sweep YAML file: tasks compared with hand-written lists, random draws with their
distribution, and mistakes with a table of error lines.
"""

import math
import re
from pathlib import Path

import pytest

from megatron_rl.launcher.sweep_file import Sweep, read_sweep, run_folder_name


def swept(tmp_path: Path, text: str) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path)


def test_a_grid_is_every_combination_with_its_values_as_typed(tmp_path: Path) -> None:
    text = (
        "overrides: [experiment=e, run.steps=20]\ngrid: {algo: [grpo, gspo], optim.lr: [1e-4, 0.00030], model.frozen: [[vision, merger]]}\n"
    )
    sweep = swept(tmp_path, text)
    assert (sweep.folder, sweep.num_processes) == (Path("runs/sweep"), 0)
    assert [task.index for task in sweep.tasks] == [0, 1, 2, 3]
    assert [" ".join(task.overrides) for task in sweep.tasks] == [
        f"experiment=e run.steps=20 algo={algo} optim.lr={lr} model.frozen=[vision,merger] "
        f"run.dir=runs/sweep/algo_{algo}+optim.lr_{lr}+model.frozen_vision_merger"
        for algo in ("grpo", "gspo") for lr in ("1e-4", "0.00030")
    ]  # fmt: skip


def test_a_list_is_what_it_names(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "list: [{}, {algo: gspo}, {+optim.lr_by_module.vision: 1e-7, plan.only: true}]\nfolder: there\nprocesses: 2\n")
    assert sweep.num_processes == 2
    assert [task.overrides for task in sweep.tasks] == [
        ["run.dir=there/as_it_is"],
        ["algo=gspo", "run.dir=there/algo_gspo"],
        ["+optim.lr_by_module.vision=1e-7", "plan.only=true", "run.dir=there/optim.lr_by_module.vision_1e-7+plan.only_true"],
    ]


RANDOM = "random: {{draws: {draws}, seed: {seed}, optim.lr: {{log: [1e-5, 1e-3]}}, algo.clip_ratio_high: {{uniform: [0.2, 0.4]}}{more}}}\n"


def drawn(tmp_path: Path, *, draws: int = 200, seed: int = 0, more: str = "") -> list[dict[str, str]]:
    return [dict(task.parameters) for task in swept(tmp_path, RANDOM.format(draws=draws, seed=seed, more=more)).tasks]


def test_draws_are_spread_as_they_say(tmp_path: Path) -> None:
    """Half of the learning rates are below the geometric mean of the bounds, and a tenth of the
    uniform interval contains a tenth of the draws, up to 3 standard deviations.
    """
    draws = drawn(tmp_path)
    rates, clips = ([float(draw[key]) for draw in draws] for key in ("optim.lr", "algo.clip_ratio_high"))
    assert 1e-5 <= min(rates) < 1.5e-5 and 7e-4 < max(rates) <= 1e-3
    assert sum(rate < 1e-4 for rate in rates) == pytest.approx(100, abs=3 * math.sqrt(50))
    assert 0.2 <= min(clips) < 0.21 and sum(clip < 0.22 for clip in clips) == pytest.approx(20, abs=3 * math.sqrt(18))
    assert all(re.fullmatch(r"\d(\.\d\d?)?e-05|0\.0\d{1,6}|0\.\d{1,3}", draw[key]) for draw in draws for key in draw), "three digits"


def test_draws_repeat_and_more_of_them_change_none(tmp_path: Path) -> None:
    """Random draws are reproducible with a seed. More draws, or another key, do not change existing
    draws.
    """
    draws = drawn(tmp_path, draws=20)
    assert drawn(tmp_path, draws=20) == draws and drawn(tmp_path, draws=30)[:20] == draws
    more = drawn(tmp_path, draws=20, more=", run.seed: [1, 2, 3]")
    assert {draw.pop("run.seed") for draw in more} == {"1", "2", "3"} and more == draws
    assert drawn(tmp_path, draws=20, seed=1) != draws


def test_a_name_needs_no_quotes() -> None:
    """Names of run directories contain only characters that need no quoting in a shell."""
    name = run_folder_name({"+task.data.train": "[my data/a,b.jsonl]", "algo": "gspo", "x": "'${y}'", "lr": "-1e+4"})
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", name) and name == "task.data.train_my_data_a_b.jsonl+algo_gspo+x_y+lr_-1e_4"


MISTAKES = [  # the yaml, and what its line says after the path
    ("grid: {}", ": grid={}: is empty and defines no runs; add at least one key with its values"),
    ("list: []", ": list=[]: is empty and defines no runs; add at least one key with its values"),
    ("grid: {optim.lr: [], algo: [grpo]}", ": grid.optim.lr=[]: is empty: an empty grid defines no run; give values, or leave the key out"),
    ("grid: {optim.lr: 1e-4}", ": grid.optim.lr=1e-4: expects a list of values; write [1e-4]"),
    ("grid: {optim: [{lr: 1e-4}]}", ": grid.optim={'lr': '1e-4'}: expects a value or a list; write a nested key with dots, a.b: value"),
    ("list: {algo: gspo}", ": list={'algo': 'gspo'}: expects a list of {key: value, ...}"),
    ("list: [algo=gspo]", ": list[0]=algo=gspo: expects {key: value, ...}"),
    ("overrides: [a=1]", "=(none): define the runs with exactly one of grid, list, random"),
    ("list: [{}]\ngrid: {a: [1]}", "=grid+list: define the runs with exactly one of grid, list, random"),
    ("gird: {a: [1]}", ": gird=...: unknown sweep key; known keys are overrides, grid, list, random, folder, processes"),
    ("overrides: a=1\nlist: [{}]", ": overrides=a=1: expects a list of overrides, [key=value, ...]"),
    ("processes: two\nlist: [{}]", ": processes=two: expects a whole number; omit this key to use one process per GPU that Slurm assigns"),
    ("- a", "=...: expects keys with values; known keys are overrides, grid, list, random, folder, processes"),
    ("grid: {a: [1}", ": line 1 is not valid YAML: expected ',' or ']', but got '}'"),
    ("random: {draws: 3, a: [1]}", ": random.seed=(none): expects a whole number"),
    ("random: {draws: -3, seed: 0, a: [1]}", ": random.draws=-3: expects a whole number"),
    ("random: {draws: 0, seed: 0, a: [1]}", ": random={'draws': '0', 'seed': '0', 'a': ['1']}: is empty and defines no runs; ..."),
    ("random: {draws: 3, seed: 0}", ": random={'draws': '3', 'seed': '0'}: defines no key to draw values for; ..."),
    ("random: {draws: 3, seed: 0, a: 1}", ": random.a=1: expects {log: [LOW, HIGH]}, {uniform: [LOW, HIGH]}, or a list to choose from"),
    ("random: {draws: 3, seed: 0, a: {log: [1, x]}}", ": random.a.log=['1', 'x']: expects two numbers, [LOW, HIGH]"),
    ("random: {draws: 3, seed: 0, a: {log: [0, 1]}}", ": random.a.log=['0', '1']: a log range requires bounds above 0"),
    ("random: {draws: 3, seed: 0, a: {uniform: [1, 1]}}", ": random.a.uniform=['1', '1']: expects two numbers, the lower one first"),
    (
        "list: [{a: 1}, {b: 1}, {a: '1'}]",
        ": run.dir=runs/sweep/a_1: is used by tasks 0, 2; define every run once, "
        "or give the tasks different values of a key such as run.seed",
    ),
]


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=[line for _, line in MISTAKES])
def test_a_mistake_is_a_line(text: str, line: str, tmp_path: Path) -> None:
    expected = re.escape(f"{tmp_path}/sweep.yaml{line}").replace(re.escape("..."), ".*") if line.endswith("...") else None
    with pytest.raises(ValueError, match=rf"^{expected or re.escape(f'{tmp_path}/sweep.yaml{line}')}$"):
        swept(tmp_path, text)


def test_a_yaml_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.yaml: no such file; give the YAML file of a sweep"):
        read_sweep(tmp_path / "nowhere.yaml")


def test_a_run_folder_is_the_sweeps_to_name(tmp_path: Path) -> None:
    """A sweep file that sets run.dir, or that leads to a directory name of more than 200
    characters, is refused.
    """
    for text in ("overrides: [run.dir=mine]\nlist: [{}]", "grid: {run.dir: [mine]}"):
        with pytest.raises(ValueError, match=r"^task 0: run\.dir=mine: a sweep sets run\.dir itself; set the sweep's folder instead$"):
            swept(tmp_path, text)
    with pytest.raises(ValueError, match="the name has more than 200 characters"):
        swept(tmp_path, f"grid: {{a: [{'x' * 200}]}}")


def test_an_index_beyond_the_list(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "grid: {a: [1, 2]}")
    assert sweep.task(1).parameters == {"a": "2"}
    for index in (2, -1):
        told = rf"^--task={index}: {re.escape(str(tmp_path))}/sweep.yaml has tasks 0 to 1; use sbatch --array=0-1$"
        with pytest.raises(ValueError, match=told):
            sweep.task(index)
