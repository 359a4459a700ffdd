"""The viewer of runs: API responses compared with rollouts written by hand, requests that it
refuses, and what a real browser renders.
"""

import html
import io
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as pil
from PIL import ImageColor
from starlette.testclient import TestClient

from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.recorder import BestWorstRecorder, save_images
from megatron_rl.observe.rollout_store import read_columns, step_path, write_step
from megatron_rl.observe.viewer import store
from megatron_rl.observe.viewer.__main__ import main
from megatron_rl.observe.viewer.demo import COLORS, make_demo_run
from megatron_rl.observe.viewer.store import TABLE_COLUMNS, find_runs, label_folders
from megatron_rl.observe.viewer.web_app import create_app
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.types import JudgeResult, Rollout, Status, StopReason, TokenSequence, ToolCall, Turn
from tests.observe.test_recorder import picture
from tests.support.browser import BrowserPage, open_browser

ATTACKS = (
    "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">", "javascript:alert(1)", "\u202eoderehtsi",
    "\x1b[2J", "</pre><h1>x", "{{7*7}}${7*7}", "x" * 20_000, "<svg onload=\"document.title='broken'\">", "\0 \ud7ff \uffff",
)  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def rollout(sample: int, reward: float | None, *, step: int, said: str = "one", group: int = 0, tool: str = "zoom") -> Rollout:
    context = TokenSequence()
    context.extend([1, 2, 3, 3], images=(picture(0, width=28, height=28),))
    context.extend([4, 5], logprobs=[-0.5, -1.5], versions=[max(0, step - sample)] * 2)
    context.set_column("old_logprobs", [0.0, 0.0, 0.0, 0.0, -0.25, -1.5])
    context.set_column("advantages", [0.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    context.set_column("entropies", [0.0, 0.0, 0.0, 0.0, 0.75, 0.5])
    call = ToolCall(
        tool=tool, source='{"bbox_2d": [2, 4, 10, 20]}', text=f"told {said[:9]}", error="" if sample else "no such thing", frame=(56, 80)
    )
    turn = Turn(sequence=0, token_span=(4, 6), text=said, reward=0.5, tool_call=call, images=[picture(1)], generation_s=0.5, env_s=1.25)
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Rollout(
        task="t", example_id=f"e{group}", source="cups" if group else "", group=group, sample_index=sample,
        question=f"who is e{group}?", answer=f"answer {group}",
        sequences=[context], turns=[turn], status=status, reward=reward,
        stop_reason=StopReason.DONE if sample % 2 else StopReason.MAX_TURNS, reward_terms={"part": math.nan} if sample == 1 else {},
        verdicts=[
            JudgeResult(judge="j", prompt="evidence 2", value=0.25, turn=0),
            JudgeResult(judge="<b>j", prompt="whole 1", value=1.0, wall_s=2.5, reasoning="<b>hm", rule_score=0.0, is_reward=False),
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with three steps of two groups of three rollouts. Its texts include injection
    attacks, and its metrics include values that JSON does not have.
    """
    folder = tmp_path_factory.mktemp("runs") / "run"
    for step in range(3):
        rollouts = [
            rollout(
                sample,
                None if (step, group, sample) == (1, 1, 2) else step + sample / 4,
                step=step,
                group=group,
                said=f"said {step} {sample}",
            )
            for group in range(2)
            for sample in range(3)
        ]
        if step == 2:
            rollouts += [rollout(number, 9.0, step=2, group=7, said=attack, tool=attack[:40]) for number, attack in enumerate(ATTACKS)]
        save_images(folder / "rollouts", rollouts)
        write_step(step_path(folder / "rollouts", step), rollouts, step=step, num_gen_batches=1)
    lines = [{"step": step, "reward/mean": step / 2, "loss": math.nan if step == 1 else 0.5, "time/total": 2.0} for step in range(3)]
    write_lines_atomically(folder / "metrics.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def alarmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with windows of 4 steps that recorded `tool_use_dies`, but not
    `groups_collapse`."""
    folder = tmp_path_factory.mktemp("alarmed") / "alarmed"
    folder.mkdir()
    lines = [
        {
            "step": step, "reward/mean": 0.5, "rollout/tool_use": float(step < 12), "rollout/zero_std_fraction": float(step >= 12),
            "alarms/tool_use_dies": float(step >= 14),
        } for step in range(20)
    ]  # fmt: skip
    write_lines_atomically(folder / "metrics.jsonl", lines)
    (folder / "config.yaml").write_text("alarms: {window: 4, disable: [groups_collapse]}\n")
    return folder


ALARM = "step 14: tool_use_dies: rollout/tool_use 1 -> 0; see docs/alarms.md#tool_use_dies"


def test_the_overview_has_the_alarms_that_a_run_raised(alarmed: Path, run: Path, tmp_path: Path) -> None:
    """A window that is no valid setting is ignored: with 10 steps, 20 are enough."""
    shutil.copytree(alarmed, tmp_path / "spoiled")
    (tmp_path / "spoiled" / "config.yaml").write_text("alarms: {window: -1}\n")
    client = TestClient(create_app(label_folders([alarmed, run, tmp_path / "spoiled"]), hosts=["testserver"]))
    told = {each["name"]: each["alarms"] for each in client.get("/api/overview").json()["runs"]}
    assert told == {"alarmed": [ALARM], "run": [], "spoiled": [ALARM.replace("14", "19")]}


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return TestClient(create_app(label_folders([run]), hosts=["testserver"]))


def found(client: TestClient, what: str, **params: object) -> object:
    reply = client.get(f"/api/{what}", params={"run": "run", **params})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"step_from": 1, "step_to": 1}, [(1, place) for place in range(6)]),
        ({"reward_from": 2.25, "reward_to": 2.5}, [(2, 1), (2, 2), (2, 4), (2, 5)]),
        ({"stop_reason": "done", "step_to": 0}, [(0, 1), (0, 4)]),
        ({"status": "failed"}, [(1, 5)]),
        ({"example": "e1", "step_to": 0}, [(0, 3), (0, 4), (0, 5)]),
        ({"tool": "zoom", "text": "SAID 2 2"}, [(2, 2), (2, 5)]),
        ({"stale_from": 2, "reward_to": 8}, [(2, 2), (2, 5)]),
        ({"source": "cups", "step_to": 0}, [(0, 3), (0, 4), (0, 5)]),
        ({"text": "nobody said this"}, []),
        ({"text": "Who IS e1", "step_to": 0}, [(0, 3), (0, 4), (0, 5)]),
        ({"errors_from": 1, "step_to": 1}, [(0, 0), (0, 3), (1, 0), (1, 3)]),
        ({"is_mixed": True, "step_from": 2}, [(2, place) for place in range(6)]),
        ({"is_mixed": True, "step_from": 1, "step_to": 1}, [(1, place) for place in range(6)]),
        ({"is_mixed": False}, [(2, 6 + place) for place in range(len(ATTACKS))]),
    ],
)
def test_the_table_has_what_is_asked_for(filters: dict, expected: list, client: TestClient) -> None:
    told = found(client, "rollouts", **filters)
    assert (
        [(row["step"], row["row_index"]) for row in told["rows"]] == expected and told["total"] == len(expected) and told["skipped"] == []
    )


@pytest.mark.parametrize(
    ("name", "content"), [("weights.json", "[]"), ("config.yaml", "run: {mode: rollout_only}"), ("config.yaml", "run: {steps: 3}")]
)
def test_what_one_set_of_weights_has_played_is_never_stale(name: str, content: str, run: Path, tmp_path: Path) -> None:
    """All tokens of an evaluation or a rollout-only run have weight version 0 in every chunk and
    step, so none counts as stale.
    """
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    client = TestClient(create_app(label_folders([tmp_path / "run"]), hosts=["testserver"]))
    assert found(client, "rollouts", stale_from=2, reward_to=8)["total"] == (2 if "steps" in content else 0)
    assert found(client, "rollouts", stale_from=0)["total"] == found(client, "rollouts")["total"]


def test_the_table_is_sorted_and_paged(client: TestClient) -> None:
    """Rows are sorted by a column and then in the order of sampling. A failed rollout has no reward
    and comes last.
    """
    rows = found(client, "rollouts", sort="reward", descending=True, step_to=1, limit=4)["rows"]
    assert [(row["reward"], row["step"], row["row_index"]) for row in rows] == [(1.5, 1, 2), (1.25, 1, 1), (1.25, 1, 4), (1.0, 1, 0)]
    rest = found(client, "rollouts", sort="reward", descending=True, step_to=1, limit=50, offset=4)
    assert len(rest["rows"]) == 8 and rest["rows"][-1]["reward"] is None and rest["total"] == 12
    assert len(found(client, "rollouts", reward_from=9)["rows"][6]["responses"]) == 400, "huge texts are cut in the table"
    for wrong in ({"sort": "responses"}, {"limit": 501}, {"offset": -1}, {"step_from": "x"}):
        assert client.get("/api/rollouts", params={"run": "run", **wrong}).status_code == 422


@pytest.mark.known_failure("images-not-logged")
def test_a_group_and_an_episode(client: TestClient) -> None:
    """Group statistics equal values computed by hand. An episode has every token with its columns,
    and separates the prompt's images from those of a turn. NaN is null.
    """
    told = found(client, "group", step=0, group=1)
    assert (told["mean"], told["std"]) == (0.25, pytest.approx(0.25 * math.sqrt(2 / 3)))
    assert [(each["row_index"], each["reward"], each["advantage"]) for each in told["members"]] == [
        (3, 0.0, 0.0),
        (4, 0.25, 0.0),
        (5, 0.5, 0.0),
    ]
    assert (told["question"], told["answer"]) == ("who is e1?", "answer 1")
    assert [image["key"] for image in told["first"]] == [picture(0, width=28, height=28).key]
    one = found(client, "episode", step=0, row_index=1)
    shown = [found(client, "episode", step=step, row_index=place) for step, place in ((0, 0), (1, 0), (1, 5))]
    neighbors = [[each[name] for name in ("before", "after")] for each in shown]
    assert neighbors == [[None, [0, 1]], [[0, 5], [1, 1]], [[1, 4], [2, 0]]] and one["missing"] == []
    assert (one["turns"][0]["generation_s"], one["turns"][0]["env_s"]) == (0.5, 1.25)
    (about,) = client.get("/api/runs").json()
    assert (about["sources"], about["stop_reasons"]) == (["cups"], ["done", "max_turns"]) and "zoom" in about["tools"]
    assert about["constant"] == ["num_turns", "num_images", "reason"] and about["rewards"] == [0.0, 9.0]
    assert one["reward_terms"] == {"part": None} and one["no_words"] == "no tokenizer was found"
    assert one["sequences"][0]["tokens"] == ["1", "2", "3", "3", "4", "5"]
    assert (
        one["sequences"][0]["columns"]["rollout_logprobs"] == [0.0, 0.0, 0.0, 0.0, -0.5, -1.5]
        and "values" not in one["sequences"][0]["columns"]
    )
    assert [image["key"] for image in one["first"]] == [picture(0, width=28, height=28).key]
    assert [image["key"] for image in one["turns"][0]["images"]] == [picture(1).key] and one["turns"][0]["tool_call"]["tool"] == "zoom"
    assert one["turns"][0]["tool_call"]["frame"] == [56, 80] and one["sequences"][0]["columns"]["entropies"][4:] == [0.75, 0.5]
    assert one["verdicts"][1] == {
        "judge": "<b>j", "prompt": "whole 1", "value": 1.0, "turn": None, "wall_s": 2.5, "reasoning": "<b>hm", "rule_score": 0.0,
        "is_reward": False,
    }  # fmt: skip
    shown = client.get(f"/picture/run/{picture(1).key}.png")
    assert shown.headers["content-type"] == "image/png" and shown.content.startswith(b"\x89PNG")
    assert found(client, "curves")[1] == {"step": 1, "reward/mean": 0.5, "loss": None, "time/total": 2.0}


def test_runs_are_compared(run: Path, tmp_path: Path) -> None:
    """The overview has the last figures, the state and the steps of each run, and only the settings
    that differ. What cannot be read is left out.
    """
    texts = {
        "one": "stage: rl\noptim: {lr: 0.1}\nrun: {steps: 3, dir: x}\n", "two": "stage: rl\noptim: {lr: 0.2}\nrun: {steps: 9, dir: y}\n",
        "three": "- no settings\n",
    }  # fmt: skip
    for name, text in texts.items():
        shutil.copytree(run, tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "one" / "eval.json").write_text("{}")
    (tmp_path / "two" / "ended.json").write_text('{"state": "failed", "line": "x", "step": 1}')
    (tmp_path / "three" / "ended.json").write_text('{"state": "<b>", "line": "x", "step": 1}')
    client = TestClient(create_app(label_folders([tmp_path / name for name in texts]), hosts=["testserver"]))
    told = client.get("/api/overview").json()
    assert told["differing"] == ["optim.lr", "run.steps"]
    assert [(each["state"], each["num_done"], each["num_steps"]) for each in told["runs"]] == [
        ("finished", 3, 3),
        ("failed", 3, 9),
        ("running", 3, 0),
    ]
    long_ago = time.time() - 150
    os.utime(tmp_path / "three" / "metrics.jsonl", (long_ago, long_ago))
    assert client.get("/api/overview").json()["runs"][2]["state"] == "", "its last step took 2 s and ended 150 s ago"
    assert told["runs"][0]["figures"] == {
        "reward/mean": 1.0, "eval/greedy_success": None, "loss": 0.5, "rollout_mismatch/logprob_abs_diff_max": None,
    }  # fmt: skip
    assert 0 <= told["runs"][0]["age_s"] < 600
    assert [each["settings"].get("optim.lr") for each in told["runs"]] == ["0.1", "0.2", None]
    both = TestClient(create_app(label_folders([tmp_path / "one", tmp_path / "two"]), hosts=["testserver"]))
    assert both.get("/api/overview").json()["differing"] == ["optim.lr", "run.steps"]


def test_examples_get_better_or_worse(client: TestClient) -> None:
    """Means by hand: the rewards of e0 are 0, 0.25, 0.5 plus the step, those of e1 lack one."""
    rows = {row["example_id"]: row for row in client.get("/api/examples", params={"run": "run"}).json()}
    assert list(rows) == ["e1", "e0", "e7"]
    assert (rows["e0"]["rollouts"], rows["e0"]["mean"], rows["e0"]["lowest"], rows["e0"]["highest"]) == (9, 1.25, 0.0, 2.5)
    # Four of the nine rewards belong to each half: 0, 0.25, 0.5, 1 and 1.5, 2, 2.25, 2.5.
    assert (rows["e0"]["early"], rows["e0"]["late"]) == (pytest.approx(1.75 / 4), pytest.approx(8.25 / 4))
    assert (rows["e0"]["groups"], rows["e0"]["mixed"], rows["e7"]["groups"], rows["e7"]["mixed"]) == (3, 3, 1, 0)
    assert rows["e1"]["rollouts"] == 8 and rows["e1"]["mean"] == pytest.approx((0.75 + 2.25 + 6.75) / 8)
    assert (rows["e7"]["question"], rows["e7"]["answer"]) == ("who is e7?", "answer 7")


def test_what_is_refused(client: TestClient, run: Path) -> None:
    """Other host names, files outside the run and unknown runs are refused. Every response has the
    content security policy.
    """
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    secret = run.parent / "secret.png"
    secret.write_bytes(b"secret")
    for key in ("../../secret", "..%2f..%2fsecret", "%2e%2e/%2e%2e/secret", "a" * 65, "a.b"):
        reply = client.get(f"/picture/run/{key}.png")
        assert reply.status_code == 404 and b"secret" not in reply.content
    for path in (
        "/api/curves?run=nobody",
        "/api/episode?run=run&step=9&row_index=0",
        "/api/episode?run=run&step=0&row_index=99",
        "/..%2f..%2fsetup.py",
    ):
        assert client.get(path).status_code == 404
    for path in ("/", "/viewer.js", "/api/runs", "/picture/run/x.png"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert client.post("/api/runs").status_code == 405


def test_scripts_never_parse_html() -> None:
    """No file of the page uses a function that parses HTML or runs text as code, and none loads
    another site.
    """
    static = Path(sys.modules[create_app.__module__].__file__).parent / "static"
    sources = {path.name: path.read_text() for path in static.iterdir()}
    assert sources.keys() >= {"index.html", "viewer.js", "viewer.css"}
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|https?://(?!www\.w3\.org)"
    assert not [name for name, source in sources.items() if re.search(forbidden, source)]


def test_best_and_worst_and_spoiled_files(run: Path, tmp_path: Path) -> None:
    """Without a rollout store, the table has the best and worst rollouts. A damaged step file or
    line is reported, and everything else is shown. New steps of an active run appear.
    """
    folder = tmp_path / "run"
    BestWorstRecorder(folder, num_best=1, num_worst=1).record(4, [rollout(sample, float(sample), step=4) for sample in range(3)])
    app = TestClient(create_app(label_folders([folder]), hosts=["testserver"]))
    assert [(row["step"], row["sample_index"], row["reward"]) for row in found(app, "rollouts")["rows"]] == [(4, 2, 2.0), (4, 0, 0.0)]
    assert found(app, "episode", step=4, row_index=1)["sample_index"] == 0
    lines = folder / "rollouts" / "step_000004.jsonl"
    best, worst = lines.read_text().splitlines()
    lines.write_text(f"{best.replace('told one', 'told ' + chr(92) + 'ud800')}\n{{no line\n{worst}\n")
    told = found(app, "rollouts")
    assert [row["row_index"] for row in told["rows"]] == [0, 2] and "step_000004.jsonl line 2: " in told["skipped"][0]
    assert found(app, "episode", step=4, row_index=0)["turns"][0]["tool_call"]["text"] == "told ?"
    write_step(step_path(folder / "rollouts", 5), [rollout(0, 5.0, step=5)], step=5, num_gen_batches=1)
    assert found(app, "rollouts")["total"] == 3
    step_path(folder / "rollouts", 5).write_bytes(b"PAR1 no such thing")
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\nno json\n{"loss": 1}\n{"step": 3, "loss": 2}\n{"step": 4, "lo')
    assert [line["step"] for line in found(app, "curves")] == [0, 3]
    told = found(app, "rollouts")
    assert told["total"] == 2 and len(told["skipped"]) == 3 and "step_000005.parquet" in " ".join(told["skipped"])
    assert label_folders([run, folder]).keys() == {"/".join(path.parts[-2:]) for path in (run, folder)}


def test_a_spoiled_folder_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    """A copied step file, wrong columns, a truncated file, an older version and invalid step
    numbers are reported or ignored, and everything else is shown. A report disappears when its file
    is removed.
    """
    folder = tmp_path / "run"
    app = TestClient(create_app(label_folders([folder]), hosts=["testserver"]))
    for step in range(4):
        write_step(step_path(folder / "rollouts", step), [rollout(0, 1.0, step=step)], step=step, num_gen_batches=1)
    whole = step_path(folder / "rollouts", 0)
    shutil.copy(whole, folder / "rollouts" / "step_000000 (copy).parquet")
    pq.write_table(pa.table({name: [{"a": 1}] for name in TABLE_COLUMNS}), step_path(folder / "rollouts", 1))
    step_path(folder / "rollouts", 2).write_bytes(whole.read_bytes()[:-9])
    older = pq.read_table(step_path(folder / "rollouts", 3)).drop_columns(["source"])
    pq.write_table(older, step_path(folder / "rollouts", 3))
    (folder / "metrics.jsonl").write_text('{"step": "NaN"}\n{"step": 1, "loss": 2}\n' + "no\n" * 6)
    told = found(app, "rollouts")
    (about,) = app.get("/api/runs").json()
    assert told["total"] == about["rollouts"] == 1 and about["last_step"] == 1 and [line["step"] for line in found(app, "curves")] == [1]
    skipped = " ".join(about["skipped"])
    assert len(about["skipped"]) == 4 and all(f"step_00000{step}.parquet: " in skipped for step in (2, 3))
    assert "lacks source; it was written by another version of this program" in skipped
    assert "metrics.jsonl line 1, 3, 4, 5, 6 and 2 more: is not a step of a run" in skipped
    for step in (1, 2, 3):
        assert app.get("/api/episode", params={"run": "run", "step": step, "row_index": 0}).status_code == 404
        step_path(folder / "rollouts", step).unlink()
    assert [line for line in found(app, "rollouts")["skipped"] if "metrics" not in line] == []
    assert app.get("/api/rollouts", params={"run": "run", "step_from": "9" * 30}).status_code == 422
    one = found(app, "episode", step=0, row_index=0)
    assert one["missing"] == [picture(0, width=28, height=28).key, picture(1).key]
    assert (one["before"], one["after"]) == (None, None)
    assert app.get(f"/picture/run/{picture(1).key}.png").status_code == 404


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "error: --port=70000: bind(): port must be 0-65535.; choose another value\n"),
        (["--host", "no.such.host.invalid"], r"error: --host=no.such.host.invalid: .*; choose another value\n"),
        (["nowhere"], "error: RUN=nowhere: no such folder; give the run.dir of a run\n"),
        (["empty"], "error: RUN=empty: contains no run; give the run.dir of a run, or a folder of runs\n"),
    ],
)
def test_it_ends_in_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid ports, hosts and folders end the viewer's command with a one-line error and exit code
    2.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "empty" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["run", *options]) == 2
    assert re.fullmatch(said.replace("()", r"\(\)"), capsys.readouterr().err)


def test_tables_are_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at the same time read each file once."""
    read: list[Path] = []

    def read_slowly(path: Path, names: Sequence[str]) -> pa.Table:
        read.append(path)
        time.sleep(0.05)
        return read_columns(path, names)

    monkeypatch.setattr(store, "read_columns", read_slowly)
    folder = store.RunFolder(run)
    with ThreadPoolExecutor(3) as threads:
        tables = list(threads.map(lambda _: folder.rollout_table(), range(3)))
    assert len(read) == len(set(read)) == 3 and all(table.num_rows == 27 for table in tables)


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    """A folder stands for the runs below it. Folders inside runs, deeper folders and links are not
    searched.
    """
    for name in ("a/metrics.jsonl", "b/c/config.yaml", "b/d/rollouts/x", "b/c/evaluations/e/config.yaml", "1/2/3/4/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "z").symlink_to(tmp_path / "a")
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "b" / "c", tmp_path / "b" / "d"]
    assert find_runs(tmp_path / "b" / "c") == [tmp_path / "b" / "c"]
    assert list(label_folders(find_runs(tmp_path))) == ["a", "c", "d"]
    assert find_runs(tmp_path / "1" / "2" / "3" / "4") == [tmp_path / "1" / "2" / "3" / "4"]


def test_the_demo(tmp_path: Path) -> None:
    """Every image and number of the demo run can be shown. An answer is correct if it names the
    color of the cropped square.
    """
    make_demo_run(tmp_path / "demo")
    app = TestClient(create_app(label_folders([tmp_path / "demo"]), hosts=["testserver"]))
    about = app.get("/api/runs").json()
    assert [(each["rollouts"], each["last_step"], each["skipped"]) for each in about] == [(192, 11, [])]
    for row in app.get("/api/rollouts", params={"run": "demo", "limit": 20, "sort": "reward", "descending": True}).json()["rows"]:
        one = app.get("/api/episode", params={"run": "demo", "step": row["step"], "row_index": row["row_index"]}).json()
        shown = app.get(f"/picture/demo/{one['turns'][0]['images'][0]['key']}.png").content
        crop = pil.open(io.BytesIO(shown))
        assert one["turns"][1]["text"] == f"<answer>{row['responses'].partition('<answer>')[2]}"
        assert (
            crop.size == (56, 56)
            and f"<answer>{next(name for name in COLORS if ImageColor.getrgb(name) == crop.getpixel((5, 5)))}<" in row["responses"]
        )


@pytest.fixture(scope="module")
def served(run: Path, alarmed: Path) -> Iterator[str]:
    port = find_free_port("127.0.0.1")
    words = [str(run), str(alarmed), "--demo", "--port", str(port), "--allow", "runs.example"]
    page = subprocess.Popen([sys.executable, "-m", "megatron_rl.observe.viewer", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout.readline() == f"http://127.0.0.1:{port}/\n"
        busy = subprocess.run(page.args, capture_output=True, text=True, check=False)
        assert busy.returncode == 2 and busy.stderr == f"error: --port={port}: Address already in use; choose another value\n"
        deadline = time.monotonic() + 20
        while httpx.get(f"http://127.0.0.1:{port}/api/runs", trust_env=False).status_code != 200:
            assert time.monotonic() < deadline
        yield f"http://127.0.0.1:{port}/"
    finally:
        page.kill()
        page.wait()


def test_names_of_this_machine(served: str) -> None:
    """The server accepts the given host names and its own. A request with any other host name comes
    from a foreign page and is refused.
    """
    names = {"runs.example": 200, "127.0.0.1:1": 200, socket.gethostname(): 200, "evil.example": 400}
    assert {name: httpx.get(served, headers={"Host": name}, trust_env=False).status_code for name in names} == names


VIEWS = {
    "runs": [f"warning: {html.escape(ALARM)}"],
    "curves?run=alarmed": [f"warning: {html.escape(ALARM)}"],
    "curves?run=run": ["reward/mean", "time/total"],
    "rollouts?run=run": ["27 rollouts, 1 to 27", "said 1 2", "javascript:alert(1)"],
    "group?run=run&step=0&group=1": ["group 1", "standard deviation", "said 0 2"],
    "episode?run=run&step=0&row_index=1&color=rollout_logprobs": [
        "turn 1",
        "told said 0 1",
        "no tokenizer was found",
        "who is e0?",
    ],
    "episode?run=run&step=0&row_index=1&color=entropies": [
        "judge j (evidence 2) 0.25",
        "judge &lt;b&gt;j (whole 1), not in the reward 1score of the rules 0judged in 2.5 s&lt;b&gt;hm",
        "generation 500 mstool 1.3 s",
        "6 tokens, entropy from 0.5 to 0.75",
    ],
    "episode?run=demo&step=11&row_index=0&color=entropies": ["made-up squares", "image_zoom_in_tool", "judge made-up judge"],
}
BOX = 'class="box" style="left: 3.57143%; top: 5%; width: 14.2857%; height: 20%;"'
"""The box [2, 4, 10, 20] of 56 x 80 pixels, drawn on an image of 28 x 28."""
HOSTILE = [f"episode?run=run&step=2&row_index={6 + number}" for number in range(len(ATTACKS))]


@pytest.fixture(scope="module")
def page(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    with open_browser(CHROMIUM, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize(
    ("view", "width"), [*((view, width) for view in VIEWS for width in (1280, 400)), *((view, 1280) for view in HOSTILE)]
)
def test_in_a_browser(view: str, width: int, served: str, page: BrowserPage, request: pytest.FixtureRequest) -> None:
    """Each view shows its texts in Chromium, no attack has run, the console is empty, and the page
    is not wider than the window.
    """
    page.set_window(width=width)
    page.console_messages.clear()
    page.navigate(f"{served}#/{view}")
    page.wait_until(
        "[...document.images].filter(each => each.loading !== 'lazy' || each.getBoundingClientRect().top < innerHeight)"
        ".every(each => each.complete)"
    )
    shown = page.evaluate("document.documentElement.outerHTML")
    assert f'data-shown="{view.partition("?")[0]}"' in shown and "<title>rollouts</title>" in shown
    text = re.sub(r"<[^>]*>", "", shown)
    assert not [word for word in VIEWS.get(view, ["turn 1"]) if word not in text]
    if view.startswith("episode?run=run"):
        page.wait_until("!!document.querySelector('.box')")
        assert BOX in page.evaluate("document.documentElement.outerHTML")
    assert not re.search(r"<script(?! type=\"module\" src=\"viewer.js\")|<img(?! src=\"picture/)|<svg onload|<h1", shown)
    assert page.evaluate("document.title") == "rollouts" and page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.console_messages == []
    pixels = page.take_screenshot()
    assert np.asarray(pixels.convert("L")).shape[1] == width and np.asarray(pixels.convert("L")).std() > 5, "something is drawn"
    copies = request.config.getoption("--screenshots")
    if copies is not None:
        copies.mkdir(parents=True, exist_ok=True)
        pixels.save(copies / f"{re.sub(r'[^a-z0-9]+', '_', view)}_{width}.png")
