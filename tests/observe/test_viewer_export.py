"""Exported pages: their data and what a browser shows equal those of the server."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from megatron_rl.observe.viewer import export
from megatron_rl.observe.viewer.__main__ import main
from megatron_rl.observe.viewer.store import label_folders
from megatron_rl.observe.viewer.web_app import create_app
from tests.observe.test_viewer import CHROMIUM
from tests.observe.test_viewer_keys import grow
from tests.support import planted_run
from tests.support.browser import BrowserPage, open_browser

QUERIES = (
    {}, {"sort": "reward"}, {"sort": "reward", "descending": "true", "offset": "50"},
    {"sort": "logprob_abs_diff_max", "descending": "true"},
    {"sort": "example_id", "limit": "200"}, {"step_from": "3", "step_to": "4"}, {"reward_from": "2", "reward_to": "4"}, {"reward_to": "4"},
    {"status": "failed"}, {"stop_reason": "max_tokens"}, {"tool": "python"}, {"tool": "zoom"}, {"example": "dots/3"}, {"errors_from": "1"},
    {"is_mixed": "true"}, {"is_mixed": "false"}, {"stale_from": "0"}, {"stale_from": "1"}, {"text": "FULL marks"}, {"text": "image 4"},
    {"term": "accuracy", "term_to": "0"}, {"term": "brevity", "term_from": "2.5", "term_to": "2.5"}, {"term": "nothing"},
    {"source": "cups"},
)  # fmt: skip


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the planted runs, and a run with the attack texts."""
    folder = tmp_path_factory.mktemp("runs")
    planted_run.write_planted_runs(folder)
    grow(folder / "attacked <b>", 0)
    return folder


@pytest.fixture(scope="module")
def exported(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "pages"
    assert main([str(runs), "--export", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def client(runs: Path) -> TestClient:
    return TestClient(create_app(label_folders([runs / "attacked <b>", runs / "high", runs / "low"]), hosts=["testserver"]))


@pytest.fixture(scope="module")
def page(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrowserPage, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(exported))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open_browser(CHROMIUM, tmp_path_factory.mktemp("browser")) as page:
            yield page, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def test_files_have_what_the_server_answers(exported: Path, client: TestClient) -> None:
    """Each file equals the server's answer, every rollout and group has a file, and no other file
    is written.
    """

    def read(name: str) -> object:
        return json.loads((exported / "data" / f"{name}.json").read_text())

    assert read("runs") == client.get("/api/runs").json()
    for number, run in enumerate(("attacked <b>", "high", "low")):
        for what in ("curves", "examples"):
            assert read(f"{number}/{what}") == client.get(f"/api/{what}", params={"run": run}).json()
        total = client.get("/api/rollouts", params={"run": run}).json()["total"]
        assert len(list((exported / "data" / str(number) / "episodes").iterdir())) == total == len(read(f"{number}/rollouts"))
    for step, row, group in ((0, 0, 0), (9, 2, 0), (15, 47, 7)):
        asked = {"run": "low", "step": step}
        assert read(f"2/episodes/{step}_{row}") == client.get("/api/episode", params={**asked, "row_index": row}).json()
        assert read(f"2/groups/{step}_{group}") == client.get("/api/group", params={**asked, "group": group}).json()
    key = read("2/episodes/0_0")["first"][0]["key"]
    assert (exported / "picture" / "low" / f"{key}.png").read_bytes() == client.get(f"/picture/low/{key}.png").content
    assert sorted(path.name for path in exported.parent.iterdir()) == ["pages"]


@needs_chromium
def test_filters_of_an_export(page: tuple[BrowserPage, str], client: TestClient) -> None:
    """For every filter and sort order, the rows that the exported page computes in the browser are
    those of the server.
    """
    browser, url = page
    browser.navigate(f"{url}#/rollouts?run=low")
    for query in QUERIES:
        expected = client.get("/api/rollouts", params={"run": "low", **query}).json()
        found = browser.evaluate(f"import('./data.js').then(data => data.ask('rollouts', {json.dumps({'run': 'low', **query})}))")
        rows = [{name: value for name, value in row.items() if name not in ("staleness", "is_mixed")} for row in found["rows"]]
        assert (found["total"], rows) == (expected["total"], expected["rows"]), query
        assert (expected["total"] > 0) == (query not in ({"tool": "zoom"}, {"stale_from": "1"}, {"term": "nothing"}, {"source": "cups"}))


@needs_chromium
def test_every_view_of_an_export(page: tuple[BrowserPage, str]) -> None:
    """All views work without a server, also on attack texts, and the console is empty."""
    browser, url = page
    browser.console_messages.clear()
    for view, text in (
        ("runs", "grad_norm of step 15 is 2233"), ("settings", "optim.weight_decay"), ("curves?run=low&run=high&by=optim.lr", "low 0.2"),
        ("examples?run=low", "0 of 92"), ("group?run=low&step=9&group=0", "HTTP 503"),
        ("episode?run=high&step=14&row_index=12", "give full marks"), ("rollouts?run=attacked <b>", "javascript:alert(1)"),
        *((f"episode?run=attacked <b>&step=0&row_index={row}", "turn 1") for row in range(3, 11)),
    ):  # fmt: skip
        browser.navigate(f"{url}#/{view.replace(' ', '%20')}")
        assert text in browser.evaluate("document.body.textContent"), view
        assert browser.evaluate("document.title") == "rollouts" and not browser.evaluate(
            "document.querySelectorAll('main script, main h1').length"
        )
    browser.wait_until("[...document.images].every(each => each.complete && each.naturalWidth > 0)")
    assert browser.console_messages == []
    browser.navigate(f"{url}#/episode?run=low&step=99&row_index=0")
    assert browser.evaluate("document.getElementById('banner').innerText") == "the exported files have no 2/episodes/99_0"


def test_a_folder_in_use_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert main([str(runs / "low"), "--export", str(tmp_path / "used")]) == 2
    assert capsys.readouterr().err == f"error: --export={tmp_path}/used: exists and is not empty; choose another folder\n"


def test_nothing_half_written_stays(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that fails in the middle leaves no folder."""
    copied: list[str] = []

    def fail_at_the_third(folder: Path, *args: object) -> None:
        copied.append(folder.name)
        if len(copied) == 3:
            raise OSError("disk full")

    monkeypatch.setattr(export, "_copy_images", fail_at_the_third)
    with pytest.raises(ValueError, match=r"cannot be written \(disk full\)"):
        export.export_runs(label_folders([runs / "low"]), tmp_path / "pages")
    assert list(tmp_path.iterdir()) == []


def test_planted_problems_are_found(client: TestClient) -> None:
    """The presets and views lead to each planted problem."""

    def rows(**query: object) -> list[dict]:
        pages = [client.get("/api/rollouts", params={"run": "high", "limit": 500, "offset": offset, **query}).json() for offset in (0, 500)]
        return [row for page in pages for row in page["rows"]]

    failed = rows(status="failed")
    assert {row["step"] for row in failed} == set(planted_run.OUTAGE_STEPS) and all("HTTP 503" in row["reason"] for row in failed)
    assert {row["example_id"] for row in rows(is_mixed=False)} == {f"dots/{planted_run.WRONG_ANSWER}"}
    first = rows(sort="logprob_abs_diff_max", descending=True)[0]
    assert first["example_id"] == f"dots/{planted_run.MISMATCHED}" and 0.5 < first["logprob_abs_diff_max"] <= 0.9
    assert {row["step"] for row in rows(status="truncated")} == {planted_run.ENDLESS_STEP}
    assert min(row["step"] for row in rows(errors_from=1)) == planted_run.BROKEN_CALLS_FROM
    short, long = rows(term="brevity", term_to=2.5), rows(term="brevity", term_from=2.75)
    assert {row["reward_terms"]["brevity"] for row in short} == {0.0, 2.5} and {row["reward_terms"]["brevity"] for row in long} == {4.0}
    assert len(short) + len(long) + len(failed) == planted_run.NUM_STEPS * planted_run.NUM_EXAMPLES * planted_run.GROUP_SIZE > 500
    examples = client.get("/api/examples", params={"run": "high"}).json()
    assert min(examples, key=lambda row: row["late"] - row["early"])["example_id"] == f"dots/{planted_run.FORGOTTEN}"
    assert {row["example_id"]: (row["solved"], row["mixed"]) for row in examples}[f"dots/{planted_run.WRONG_ANSWER}"] == (0, 0)
    overview = client.get("/api/overview").json()
    assert overview["differing"] == ["optim.lr"]
    assert [(run["state"], run["reason"]) for run in overview["runs"][1:]] == [
        ("failed", planted_run.ENDS["high"]),
        ("stopped", planted_run.ENDS["low"]),
    ]
