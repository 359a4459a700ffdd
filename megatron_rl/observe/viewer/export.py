"""Writes the page and the data of runs as files, which any web server can serve.

- DIR/index.html, *.js, *.css: the page.
- DIR/data/runs.json, overview.json: all runs.
- DIR/data/0/curves.json, rollouts.json, examples.json: the first run.
- DIR/data/0/episodes/STEP_ROW.json, groups/STEP_GROUP.json: its rollouts and groups.
- DIR/picture/RUN/KEY.png: images.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rich.console import Console
from rich.progress import track

from megatron_rl.io.rollout_codec import IMAGE_KEY_PATTERN
from megatron_rl.observe.viewer import page_data
from megatron_rl.observe.viewer.filters import compute_staleness, find_mixed_groups
from megatron_rl.observe.viewer.overview import make_overview
from megatron_rl.observe.viewer.page_data import DecoderCache, to_json_value
from megatron_rl.observe.viewer.store import RunFolder, plain_rows
from megatron_rl.observe.viewer.web_app import CONTENT_SECURITY_POLICY, STATIC
from megatron_rl.types import Rollout

PAGE_HEAD = '<html lang="en">\n<head>\n'
EXPORT_HEAD = '<html lang="en" data-source="files">\n<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
"""Start of index.html in an export: data.js reads files, and the policy is part of the page."""


def export_runs(folders: Mapping[str, RunFolder], out: Path) -> int:
    """Write the page of these runs to a new folder and return the number of exported rollouts.

    Files that cannot be read are left out, and the page lists them.

    Raises:
        ValueError: the folder exists and is not empty, it cannot be written, or a rollout is
            damaged.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError("exists and is not empty; choose another folder")
    try:
        with _new_folder(out) as folder:
            _write_page(folder)
            count = sum(_export_run(folder / "data" / str(number), name, run, folder) for number, (name, run) in enumerate(folders.items()))
            _write_json(folder / "data" / "runs.json", [page_data.run_summary(name, run) for name, run in folders.items()])
            overview = make_overview(folders)
            runs = [{**run, "age_s": None} for run in overview["runs"]]  # the time since a run's last step would be out of date
            _write_json(folder / "data" / "overview.json", to_json_value({**overview, "runs": runs}))
            return count
    except OSError as error:
        raise ValueError(f"cannot be written ({error})") from error


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` if the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes it private
        if out.exists():
            out.rmdir()
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_page(folder: Path) -> None:
    shutil.copytree(STATIC, folder, dirs_exist_ok=True)
    page = (STATIC / "index.html").read_text()
    assert PAGE_HEAD in page, "index.html starts as PAGE_HEAD says"
    (folder / "index.html").write_text(
        page.replace(PAGE_HEAD, EXPORT_HEAD.format(policy=CONTENT_SECURITY_POLICY.partition("; frame-anc")[0]))
    )


def _export_run(data: Path, name: str, run: RunFolder, root: Path) -> int:
    """Write the data and images of a run, and return its number of rollouts."""
    table, decoders = run.rollout_table(), DecoderCache()
    staleness, mixed = compute_staleness(table, run).to_pylist(), find_mixed_groups(table, of=table).to_pylist()
    rows = [
        {**row, "staleness": behind, "is_mixed": is_mixed}
        for row, behind, is_mixed in zip(plain_rows(table), staleness, mixed, strict=True)
    ]
    _write_json(data / "rollouts.json", to_json_value(rows))
    _write_json(data / "curves.json", page_data.curve_lines(run))
    _write_json(data / "examples.json", page_data.example_rows(run))
    order = [None, *sorted([row["step"], row["row_index"]] for row in rows), None]
    neighbors = {tuple(at): (before, after) for before, at, after in zip(order, order[1:], order[2:], strict=False) if at is not None}
    decoder, console = decoders.get_decoder(run), Console(stderr=True)
    try:
        for step in track(sorted({row["step"] for row in rows}), description=name, console=console, disable=not console.is_terminal):
            rollouts = run.load_rollouts(step, lambda row: True)
            for row_index, rollout in rollouts:
                shown = page_data.describe_episode(run, rollout, decoder, neighbors[step, row_index])
                _write_json(data / "episodes" / f"{step}_{row_index}.json", shown)
                _copy_images(root / "picture" / name, run, rollout)
            for group, members in groupby(sorted(rollouts, key=_group_of), key=_group_of):
                _write_json(data / "groups" / f"{step}_{group}.json", page_data.describe_group(list(members)))
    finally:
        decoders.close()
    return len(rows)


def _group_of(member: tuple[int, Rollout]) -> int:
    return member[1].group


def _copy_images(folder: Path, run: RunFolder, rollout: Rollout) -> None:
    for key in {image.key for image in rollout.images if IMAGE_KEY_PATTERN.fullmatch(image.key)}:
        content = None if (folder / f"{key}.png").exists() else run.read_image(key)
        if content is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{key}.png").write_bytes(content)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
