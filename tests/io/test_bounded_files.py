"""Reading of untrusted files: special files do not block, oversized files are not read, and YAML
tags and aliases have no effect."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megatron_rl.cli import compare
from megatron_rl.cli.app import exit_with_line
from megatron_rl.data.clips import StoredVideo
from megatron_rl.data.images import StoredImage
from megatron_rl.distributed.world import read_world
from megatron_rl.errors import PermanentInfraError
from megatron_rl.evaluation.paired_comparison import EvaluationResult
from megatron_rl.explain.recorded_step import read_step
from megatron_rl.export.sft_transcripts import link_images
from megatron_rl.io.bounded_files import is_regular, open_regular, parse_yaml, read_bytes, read_tail, read_text, read_yaml, to_printable
from megatron_rl.io.jsonl import iterate_lines, parse_number, read_json, read_lines
from megatron_rl.launcher import sweep_report
from megatron_rl.launcher.sweep_file import read_sweep
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe import plot
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import image_keys_in, make_image_loader, read_recorded
from megatron_rl.observe.rollout_store import image_keys_of_step, num_rows, read_columns, read_rollouts, write_step
from megatron_rl.preflight.nodes import describe_path
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.checkpoints import read_state
from megatron_rl.run.model_card import _metadata_of
from megatron_rl.services.address import find_address
from megatron_rl.types import Image, Rollout, TokenSequence
from megatron_rl.weights.formats import pickle_tensors
from megatron_rl.weights.formats.digests import recorded_files
from megatron_rl_sandbox.token import read_token
from tests.observe.test_recorder import picture
from tests.support import bombs

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "json": ("x.json", lambda folder: read_json(folder / "x.json")),
    "lines": ("x.jsonl", lambda folder: read_lines(folder / "x.jsonl")),
    "settings": ("config.yaml", lambda folder: read_settings(folder / "config.yaml")),
    "metrics": ("metrics.jsonl", lambda folder: read_metrics(folder / "metrics.jsonl")),
    "best and worst": ("rollouts/step_000001.jsonl", lambda folder: read_recorded(folder / "rollouts" / "step_000001.jsonl")),
    "keys of lines": ("rollouts/step_000001.jsonl", lambda folder: image_keys_in(folder / "rollouts" / "step_000001.jsonl")),
    "columns": ("x.parquet", lambda folder: read_columns(folder / "x.parquet", ["step"])),
    "rollouts": ("x.parquet", lambda folder: read_rollouts(folder / "x.parquet")),
    "rows": ("x.parquet", lambda folder: num_rows(folder / "x.parquet")),
    "picture": ("images/a.png", lambda folder: make_image_loader(folder)("images/a.png")),
    "state": ("run/state.json", read_state),
    "step": ("rollouts/step_000001.jsonl", lambda folder: read_step(folder, 1)),
    "sweep": ("sweep.yaml", lambda folder: read_sweep(folder / "sweep.yaml")),
    "pickle": ("x.pt", lambda folder: pickle_tensors.load(folder / "x.pt")),
    "model": ("config.json", read_spec),
    "model on nodes": ("config.json", describe_path),
    "token": ("token", lambda folder: read_token(folder / "token")),
}
"""Reader name -> path that the tests replace by a special file, and the function that reads it."""
QUIET: dict[str, tuple[str, Callable[[Path], object], object]] = {
    "keys of a step": ("x.parquet", lambda folder: image_keys_of_step(folder / "x.parquet"), frozenset()),
    "model card": ("README.md", _metadata_of, {}),
    "records": ("run/state.json", recorded_files, None),
    "service": ("services/judge.json", lambda folder: find_address(folder, "judge", "vllm"), ""),
}
"""Readers that treat a special file as missing: path, function, and the value that it returns."""


@pytest.fixture
def in_time() -> Iterator[None]:
    """Fail the test if it runs longer than 10 s."""

    def end(number: int, frame: object) -> None:
        pytest.fail("it waits")  # not an Exception: readers turn those into error lines

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("reader", READERS)
def test_nobody_waits_for_who_writes_a_fifo(reader: str, tmp_path: Path) -> None:
    """Every reader rejects a FIFO in one line instead of waiting for a writer."""
    name, reads = READERS[reader]
    fifo(tmp_path / name)
    with pytest.raises(ValueError, match=r".") as refused:
        reads(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("reader", QUIET)
def test_a_fifo_is_no_file(reader: str, tmp_path: Path) -> None:
    """Readers of optional files treat a FIFO as a missing file."""
    name, reads, expected = QUIET[reader]
    fifo(tmp_path / name)
    assert reads(tmp_path) == expected


def test_regular_files_alone(tmp_path: Path) -> None:
    """Devices, folders, links (if links are not followed) and impossible file names are
    rejected."""
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="^is not a regular file$"):
            open_regular(path)
    assert read_text(tmp_path / "link", at_most=7) == "content"
    with pytest.raises(OSError, match="symbolic links"):
        read_bytes(tmp_path / "link", at_most=7, follow_link=False)
    assert [is_regular(tmp_path / name) for name in ("file", "link", "x" * 5000, "a\0b", "none")] == [True, True, False, False, False]
    assert not is_regular(tmp_path / "link", follow_link=False)


def test_no_more_than_the_limit(tmp_path: Path) -> None:
    """A file above the size limit is rejected with its size and the limit, also if its reported
    size is 0."""
    path = tmp_path / "x"
    bombs.write_sparse_file(path, 10 << 30)
    with pytest.raises(ValueError, match=f"^has {10 << 30} bytes, more than 100$"):
        read_bytes(path, at_most=100)
    path.write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match=r"^has 101 bytes, more than 100$"):
        read_bytes(path, at_most=100)
    assert read_bytes(path, at_most=101) == b"x" * 101
    with pytest.raises(ValueError, match=r"^has \d+ bytes, more than 1000$"):
        read_bytes(Path("/proc/self/maps"), at_most=1000)  # its reported size is 0


def test_the_end_of_a_log(tmp_path: Path) -> None:
    """`read_tail` returns the last 64 KiB of a huge log, or the part after `start`."""
    path = tmp_path / "log"
    bombs.write_sparse_file(path, 10 << 30)
    with path.open("ab") as file:
        file.write(b"\nlast \xff word\n")
    assert read_tail(path).endswith("\nlast \ufffd word\n") and len(read_tail(path)) == 64 << 10
    path.write_text("before\nafter\n")
    assert (read_tail(path, start=7), read_tail(path, num_bytes=3)) == ("after\n", "er\n")


def test_lines_have_limits(tmp_path: Path) -> None:
    """A line above the limit, or a file above its limit, raises an error with the line number."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1\n22\n333\n4")
    assert list(iterate_lines(path, max_line_bytes=4)) == [(1, b"1\n"), (2, b"22\n"), (3, b"333\n")]
    with pytest.raises(ValueError, match=rf"^{path} line 3: has more than 3 bytes$"):
        list(iterate_lines(path, max_line_bytes=3))
    with pytest.raises(ValueError, match=rf"^{path} line 3: the file has more than 8 bytes$"):
        list(iterate_lines(path, max_line_bytes=4, at_most=8))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_a_number_that_no_column_holds(number: int, tmp_path: Path) -> None:
    """An integer beyond 64 bits in metrics.jsonl is rejected."""
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
    with pytest.raises(ValueError, match="is not a number"):
        read_metrics(tmp_path / "metrics.jsonl")
    assert parse_number(2**63 - 1) == 2**63 - 1


ODD_YAML = (
    '!!int ""', "!!timestamp x", "!!float x", "!!bool x", "!!binary \xff", "? {a: b}\n: c", "2001-99-99", "9" * 5000, "[" * 50_000, "a: *b",
    "a: &b [*b]", "--- a\n--- b", "!!python/object/apply:os.getpid []", "\x00", "%YAML 3.0\n--- a",
)  # fmt: skip


@pytest.mark.parametrize("text", ODD_YAML, ids=range(len(ODD_YAML)))
def test_what_is_no_yaml_is_one_line(text: str) -> None:
    """Invalid YAML raises a one-line ValueError.

    For some of the texts the YAML parser alone raises other exceptions than YAMLError.
    """
    with pytest.raises(ValueError, match="is not valid YAML: ") as refused:
        parse_yaml(text)
    assert not isinstance(refused.value, yaml.YAMLError) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_yaml_is_read_as_it_stands(tmp_path: Path) -> None:
    """Valid YAML is read as PyYAML reads it, and aliases are rejected with their line."""
    text = "a: [1, 2.5, true, null, 2001-01-01]\nb: {c: 'x: y'}\nd: |\n  e\n"
    (tmp_path / "x.yaml").write_text(text)
    assert read_yaml(tmp_path / "x.yaml") == yaml.safe_load(text)
    assert read_yaml(tmp_path / "x.yaml", as_text=True) == yaml.load(text, Loader=yaml.BaseLoader)
    with pytest.raises(ValueError, match=r"^line 2 is not valid YAML: the alias \*x is not allowed; replace it with its value$"):
        parse_yaml("a: &x [1]\nb: *x\n", as_text=True)


def test_links_of_strangers_are_not_exported(tmp_path: Path) -> None:
    """A symbolic link in an image folder is not exported.

    A hard link to its target would put any file of the user into a folder to be published.
    """
    (tmp_path / "run" / "images").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run" / "images" / "a.png").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/run/images/a.png: is a symbolic link, "):
        link_images(tmp_path / "run", tmp_path / "out", ["a"])
    assert not list((tmp_path / "out").rglob("*.png"))


def test_a_bank_knows_keys_that_name_files(tmp_path: Path) -> None:
    """The rollout store returns only image keys that are valid file names.

    A resumed run looks up the images of all returned keys.
    """
    images = (picture(0), replace(picture(1), key="x" * 300))
    rollout = Rollout(sequences=[context_of(*images)], task="t", example_id="e", group=0, sample_index=0)
    write_step(tmp_path / "step_000001.parquet", [rollout], step=1, num_gen_batches=1)
    assert image_keys_of_step(tmp_path / "step_000001.parquet") == {picture(0).key}
    with pytest.raises(ValueError, match="not an image key"):
        read_rollouts(tmp_path / "step_000001.parquet", with_images=False)


def context_of(*images: Image) -> TokenSequence:
    context = TokenSequence()
    context.extend([1], images=images)
    return context


def test_the_largest_settings_take_seconds(tmp_path: Path) -> None:
    """Settings of up to 512 KiB are parsed in seconds: about 6 s of CPU time at most, a tenth of
    that in this test. Larger files are rejected unparsed."""
    path = tmp_path / "config.yaml"
    path.write_text("a: [" + "a," * 25_000 + "]\n")
    began = time.process_time()
    assert len(read_settings(path)["a"]) == 25_000
    assert time.process_time() - began < 10
    path.write_text("a: " + "x" * (512 << 10))
    with pytest.raises(ValueError, match=r"^has 524291 bytes, more than 524288$"):
        read_settings(path)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("number", ["1" + ":59" * 160_000, "0x" + "f" * 400_000, "1" + ":59" * 160_000 + ".5", "!!int " + "7" * 101])
def test_a_number_of_yaml_has_no_more_digits_than_any_needs(number: str) -> None:
    """A YAML number of more than 100 characters is rejected.

    A base-60 number would take minutes to parse; a hexadecimal one is parsed at once and raises
    when it is printed.
    """
    with pytest.raises(ValueError, match=r"^line 2 is not valid YAML: a number of \d+ characters, more than 100$"):
        parse_yaml(f"a: 1\nb: {number}\n")
    assert parse_yaml("a: 1:30\nb: " + "7" * 100) == {"a": 90, "b": int("7" * 100)}
    assert parse_yaml("a: 1" + ":59" * 100_000, as_text=True)["a"].endswith(":59")


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_pictures_and_videos_of_questions_are_regular_files(kind: str, tmp_path: Path) -> None:
    """An image or video that has become a special file is rejected when it is opened.

    It was a regular file when the rows were read; anyone with write access may have replaced it
    since.
    """
    paths = [tmp_path / "a.png", tmp_path / "a.mp4"]
    for path in paths:
        os.mkfifo(path) if kind == "FIFO" else path.symlink_to("/dev/zero")
    image, clip = StoredImage(paths[0], "row 1"), StoredVideo(paths[1], "row 1")
    for reads in (image.open, image.read, clip.read):
        with pytest.raises(PermanentInfraError, match=r"^row 1: cannot be opened \(is not a regular file\)$"):
            reads()
    for reads in (image.size, image.check_complete, clip.check_video):
        with pytest.raises(ValueError, match=r"is not a regular file$"):
            reads()


def test_words_of_files_leave_the_terminal_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of untrusted text are replaced before printing: folder names, the settings
    of an evaluation, and the last line of a program."""
    assert to_printable("a\n  b \x1b]0;owned\x07\u202e\u00e9") == "a b ?]0;owned??\u00e9"
    run = tmp_path / "\x1b[2Jrun"
    run.mkdir()
    assert (plot.main([str(run)]), sweep_report.main([str(run)]), compare.main([str(run), str(run)])) == (2, 1, 1)
    stated = [EvaluationResult(run, {"a": 1.0, "b": 0.0}, {"temperature": f"{escape}]0;owned"}, False) for escape in ("\x1b", "\x9b")]
    compare.print_comparison(stated, Console(width=160))
    with pytest.raises(SystemExit):
        exit_with_line("model_type \x1b]0;owned\x07", read_world())
    said = capsys.readouterr()
    assert not {"\x1b", "\x9b", "\x07"} & {*said.out, *said.err} and said.err.count("?[2Jrun") == 2
    assert (
        said.err.splitlines()[-1] == "error: model_type ?]0;owned?"
        and "different temperature: ?]0;owned; the first evaluation: ?]0;owned" in said.out
    )
