"""The doctor reports problems before a run starts. Oracles: faults planted one at a time, the run's
own checks, and real HTTP servers.
"""

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path

import psutil
import pytest
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file

import megatron_rl_sandbox.host_report
from megatron_rl.algo.rollout_correction import mismatch_warnings
from megatron_rl.config import ColumnSettings, McpServerSettings, Settings, ToolSettings
from megatron_rl.data.questions import load_questions, open_questions
from megatron_rl.data.survey import survey_questions
from megatron_rl.errors import InfraError
from megatron_rl.preflight import doctor
from megatron_rl.preflight.check_report import CheckReport, print_report
from megatron_rl.preflight.doctor import check_judges, check_sandbox, report_questions, run_checks
from megatron_rl.rewards.judge import Judge
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.vqa import ANSWER
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.contracts.test_configs import settings_of
from tests.support import fork_server
from tests.support.data_files import make_png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect Arrow copies to a temporary folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


ROW = {"question": "Which color?", "answer": "red", "data_source": "vstar", "images": [{"bytes": make_png()}]}


@pytest.fixture
def sound(random_model: Path, tmp_path: Path) -> list[str]:
    """Return the overrides of a run that can start."""
    path = write_rows(tmp_path / "mine.parquet", [ROW] * 3)
    limits = ["model.min_pixels=784", "model.max_pixels=3136"]
    return ["task=vqa", f"model.path={random_model}", f"run.dir={tmp_path}/run", f"task.data.train=[{path}]", f"task.data.eval=[{path}]",
            "task.max_new_tokens=100", "plan.host_gb=100", *limits]  # fmt: skip


@pytest.fixture
def judge() -> Iterator[tuple[str, dict[str, object]]]:
    """Start a server; yield its address and the dict with the status and body of its /v1/models
    response.
    """
    answers: dict[str, object] = {"status": 200, "body": json.dumps({"data": [{"id": "judge"}]})}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers["status"] if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(str(answers["body"]).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_that_can_start(sound: list[str], tmp_path: Path) -> None:
    report = run_checks(settings_of(*sound))
    assert report.errors == report.warnings == []
    found = dict(report.findings)
    assert found["data.train"].startswith("3 rows, 3 images, longest prompt ") and found["data.train"].endswith("; vstar 3")
    assert found["task"] == "vqa" and str(tmp_path / "run") in found["run.dir"]
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_is_told_in_a_line_each(sound: list[str], tmp_path: Path) -> None:
    changed = [{"answer": ""}, {"data_source": "mine"}, {"extra_info": {"bbox": [5, 5, 5, 9]}}, {"images": ["no.png"]}]
    path = write_rows(tmp_path / "bad.jsonl", [ROW | change for change in changed])
    talks = write_rows(tmp_path / "talks.jsonl", [{"messages": [{"role": "user", "content": "?"}]}])
    changes = [f"task.data.train=[{path}]", f"task.data.demonstrations=[{talks}]", "engine.max_images=1", "model.path=/nowhere"]
    report = run_checks(settings_of(*sound, *changes))
    assert report.errors == [
        "model.path=/nowhere: no such folder (looked in /nowhere); use a Hugging Face model folder",
        "task.data.train: bad.jsonl row 0: answer: is empty",
        f"task.data.train: bad.jsonl row 3: images[0]: no such file {tmp_path}/no.png; "
        "task.data.images is the folder that relative paths start from",
        "task.data.demonstrations: talks.jsonl row 0: messages: must end with an assistant message",
    ]
    assert [line.partition(": ")[2] for line in report.warnings] == [
        "bad.jsonl row 2: bbox [5, 5, 5, 9] is empty",
        "data_source mine: has no specific rule; its answers are compared as text, number, choice and mathematics, then by a judge",
    ]


def test_the_tools_of_mcp_servers_are_listed(sound: list[str]) -> None:
    """A server that lists tools is a finding, and one that does not start is an error."""
    tools = '[{"name": "look", "description": "Looks.", "inputSchema": {"type": "object"}}]'
    command = [sys.executable, str(ROOT / "tests" / "support" / "scripted_mcp_server.py"), tools, "[]"]
    settings = settings_of("task=visual_python", *sound[1:], "task.tool_format=functions")
    plain = run_checks(settings)
    settings.task.tools = ToolSettings(mcp=[McpServerSettings(name="eyes", command=command)])
    report = run_checks(settings)
    assert report.errors == plain.errors
    assert dict(report.findings)["task.tools.mcp"].startswith("eyes: tools are listed; the text around a question has ")
    lengths = [int(re.findall(r"longest prompt (\d+)", dict(each.findings)["data.train"])[0]) for each in (plain, report)]
    assert lengths[0] + 20 < lengths[1] < lengths[0] + 200, "the tool is in the prompt"
    settings.task.tools.mcp[0].command = [sys.executable, "-c", "raise SystemExit('no licence')"]
    gone = "task.tools.mcp[eyes]: the server failed (MCPError: Connection closed; no licence)"
    assert gone in run_checks(settings).errors


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    """The doctor reports, in one line each, a file with its images in another column and a file
    without answers.
    """
    for name in ("red.png", "blue.png"):
        (tmp_path / name).write_bytes(make_png())
    rows = [{"question": "?", "answer": "a", "image": "red.png", "shot": "blue.png"}] * 2 + [
        {"question": "?", "answer": "a", "look": "red.png"}
    ]
    report = CheckReport()
    for name, given in {"a.jsonl": rows, "b.jsonl": [{"question": "?", "label": "x"}] * 30}.items():
        opened = open_questions(
            [str(write_rows(tmp_path / name, given))], images_root="", name="train", columns=ColumnSettings(id="number")
        )
        report_questions(survey_questions(opened), report, split="train", longest=None)
    shows = "looks like paths of pictures that exist and is not read"
    assert report.errors == [
        "task.data.columns.id=number: no row has that column; columns: question, answer, image, shot, look",
        f"task.data.train: a.jsonl row 2: column look {shows} (1 of 3 rows): 'task.data.columns={{images: look}}'",
        "task.data.train: b.jsonl: no answer (all 30 rows). Columns: question, label. Choose one: 'task.data.columns={answer: label}'",
    ]
    bare, warning, unread = report.warnings
    assert bare.startswith("task.data.train: a.jsonl row 2: 1 of 3 rows have no image in column image: ")
    assert unread.startswith("task.data.train: a.jsonl row 0: columns shot, look are not read: ")
    assert warning.startswith(f"task.data.train: a.jsonl row 0: column shot {shows} (2 of 3 rows): other images of the row are read; ")
    assert dict(report.findings)["data.train"].startswith("30 rows, 0 images; ")


def test_a_picture_that_is_cut_off_is_found(sound: list[str], tmp_path: Path) -> None:
    """A truncated image is an error although its header is complete and states its size."""
    path = write_rows(tmp_path / "cut.jsonl", [ROW, ROW | {"images": [{"bytes": make_png(size=(300, 300))[:-30]}]}])
    (error,) = run_checks(settings_of(*sound, f"task.data.train=[{path}]")).errors
    assert error.startswith("task.data.train: cut.jsonl row 1: images[0]: cannot be opened (")


def test_a_host_that_cannot_hold_the_plan(sound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One process needs a little more than 7 GB of main memory. The doctor warns about
    plan.host_gb=5 and about a machine with 4 GiB.
    """
    (warning,) = run_checks(settings_of(*sound, "plan.host_gb=5")).warnings
    assert re.match(r"plan.host_gb=5.0: its 5.0 GB are less than the 7\.\d GB that 1 process may need at most; ", warning), warning
    memory = psutil.virtual_memory()._replace(total=4 << 30, available=4 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    (warning,) = run_checks(settings_of(*sound, "plan.host_gb=0")).warnings
    assert warning.startswith("plan.host_gb=0.0: this machine's 4.3 GB are less than the 7.")


def test_a_model_without_a_tensor(sound: list[str], random_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in random_model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes((random_model / "model.safetensors").read_bytes()[:1000])
    (error,) = run_checks(settings_of(*sound, f"model.path={broken}")).errors
    assert error.startswith(f"model.path={broken}: ")


def test_the_folder_of_a_critics_own_trunk(sound: list[str], random_model: Path, tmp_path: Path) -> None:
    """critic.path is checked like model.path and reported under its own key; each problem is
    reported once.
    """
    trunk, own = tmp_path / "trunk", ["algo=ppo", "critic.backbone=own"]
    shutil.copytree(random_model, trunk)
    well = run_checks(settings_of(*sound, *own, f"critic.path={trunk}"))
    assert well.errors == [] and dict(well.findings)["critic.path"].startswith(f"{trunk}: 4 layers of ")
    save_file(dict(islice(load_file(trunk / "model.safetensors").items(), 3, None)), trunk / "model.safetensors")
    (lacks,) = run_checks(settings_of(*sound, *own, f"critic.path={trunk}")).errors
    assert re.fullmatch(rf"critic.path={trunk}: lacks \S+ and 2 more tensors; download it again", lacks)
    os.truncate(trunk / "model.safetensors", 1000)
    (damaged,) = run_checks(settings_of(*sound, *own, f"critic.path={trunk}")).errors
    assert damaged.startswith(f"critic.path={trunk}: ") and "corrupt" in damaged
    report = run_checks(settings_of(*sound, *own, "critic.path=/nowhere"))
    assert report.errors[0].startswith("critic.path=/nowhere: no such folder (looked in /nowhere); ") and len(report.errors) == 1
    assert dict(report.findings)["critic.path"] == "not usable" and "longest prompt" in dict(report.findings)["data.train"]


def test_a_critic_that_the_layout_does_not_fit(sound: list[str], tmp_path: Path) -> None:
    """The check uses the critic's 3 attention heads, not the policy's 4."""
    make_checkpoint(tmp_path / "trunk", preset="nano", init="random", seed=1, hidden=96, heads=3, kv_heads=1)
    (error,) = run_checks(
        settings_of(*sound, "algo=ppo", "critic.backbone=own", f"critic.path={tmp_path / 'trunk'}", "parallel.tp=2")
    ).errors
    assert error == "parallel.tp=2: does not divide the critic's 3 attention heads; use one of 1"


def test_long_prompts_and_many_pictures(sound: list[str], tmp_path: Path, random_model: Path) -> None:
    """The doctor reports prompts that are too long or have too many images exactly as a run does at
    startup. A prompt fits if one response token still fits after the whole prompt, which the
    renderer builds from the task's texts. The reported length of a question is its contribution to
    the prompt.
    """
    many = {
        **ROW,
        "question": "Is <image> or <image> larger, or are they equally large?",
        "images": [{"bytes": make_png(size=(300, 90))}] * 2,
    }
    path = write_rows(tmp_path / "long.json", [ROW, many])
    renderer = Renderer(settings_of(*sound).model)
    picture = {"type": "image", "image": Image.new("RGB", (300, 90))}
    texts = [{"type": "text", "text": text} for text in ("Is ", " or ", " larger, or are they equally large?")]
    parts = [texts[0], picture, texts[1], picture, texts[2]]
    told = {"type": "text", "text": ANSWER}
    prompts = [renderer.prompt([{"role": "user", "content": content}]) for content in ([*parts, told], parts, [])]
    whole, asked, nothing = (len(prompt.token_ids) for prompt in prompts)
    length = asked - nothing
    changes = [f"task.data.train=[{path}]", "engine.max_images=1", f"engine.max_model_len={whole}", "run.max_failed_fraction=0.5"]
    report = run_checks(settings_of(*sound, *changes))
    assert report.errors == []
    assert report.warnings == [
        f"task.data.train: long.json row 1: {length} tokens in addition to the {whole - length} of its prompt leave no room for a "
        f"response; "
        "raise engine.max_model_len or lower model.max_pixels",
        "task.data.train: long.json row 1: 2 images; raise engine.max_images=1",
    ]
    assert f"longest prompt {whole} tokens" in dict(report.findings)["data.train"]
    (error,) = run_checks(settings_of(*sound, *changes, "run.max_failed_fraction=0.49")).errors
    assert error.startswith(f"task.data.train=['{path}']: 1 of 2 prompts do not fit, run.max_failed_fraction=0.49; long.json row 1: ")
    shown = [f"task.data.eval=[{path}]", *changes[1:3], "run.max_failed_fraction=0"]
    assert run_checks(settings_of(*sound, *shown, "task.data.max_eval=1")).errors == [], "the row that does not fit is not played"
    assert len(run_checks(settings_of(*sound, *shown, "task.data.max_eval=2")).errors) == 1
    asked = ["stage=sft", "sft.splits=[transcripts]", "sft.steps=[1]"]
    warm = run_checks(settings_of(*sound, *shown, *asked)).errors
    assert len(warm) == 1 and "task.data.demonstrations" in warm[0], "which lacks; nobody minds the questions of a warm start"
    answers = ["stage=sft", "sft.steps=[1]"]
    assert run_checks(settings_of(*sound, *answers)).errors == [], "the answers of task.data.train"
    (lacking,) = run_checks(settings_of(*sound, *answers, "task.data.train=[]")).errors
    assert lacking.startswith("task.data.train=[]: give the files")
    fits = run_checks(settings_of(*sound, *changes[:1], "engine.max_images=2", f"engine.max_model_len={whole + 1}"))
    assert fits.warnings == []
    assert len(load_questions([str(path)], images_root="", name="train")) == 2


OTHER = '{"data": [{"id": "other"}]}'


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [(200, OTHER, "not usable"), (401, "", "not usable"), (200, '{"data": []}', "answers"), (200, "<html>", "answers"),
     (200, "[]", "answers"), (404, "", "answers"), (429, "busy", "answers"), (500, "", "answers"),
     (200, OTHER.replace("other", "judge"), "serves judge")],
)  # fmt: skip
def test_the_doctor_thinks_of_a_judge_as_a_run_does(status: int, body: str, found: str, judge: tuple, sound: list[str]) -> None:
    """For each response of a judge server, the doctor reports the same errors as the start of a
    run.
    """
    url, answers = judge
    answers |= {"status": status, "body": body}
    settings = settings_of(*sound, f"task.judge.urls=[{url}]", "task.judge.model=judge")
    report = CheckReport()
    check_judges(settings, report)
    assert report.findings == [(f"judge {url}", found.replace("answers", "responds, but does not list its models"))]
    assert report.errors == refusals(settings) and report.warnings == [] and bool(report.errors) == (found == "not usable")
    assert all(error.startswith(f"task.judge.urls=['{url}']: no judge is available ({url}: ") for error in report.errors)


def refusals(settings: Settings) -> list[str]:
    """Return the error with which a run with this judge fails to start, as a list, or an empty
    list.
    """

    async def start() -> None:
        asked = Judge(settings.task.judge)
        try:
            await asked.start()
        finally:
            await asked.close()

    try:
        asyncio.run(start())
    except InfraError as fault:
        return [str(fault)]
    return []


def test_judges_one_well_and_one_down(judge: tuple, sound: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """If one of two judges responds, the doctor gives a warning and no error. A run starts with the
    same warning.
    """
    url, _ = judge
    settings = settings_of(*sound, f"task.judge.urls=[{url},http://127.0.0.1:9/v1]", "task.judge.model=judge")
    report = CheckReport()
    check_judges(settings, report)
    assert report.findings == [(f"judge {url}", "serves judge"), ("judge http://127.0.0.1:9/v1", "not usable")]
    (warning,) = report.warnings
    assert report.errors == [] and "not all are available, continuing with the others (http://127.0.0.1:9/v1: ConnectError" in warning
    assert refusals(settings) == [] and capsys.readouterr().err == f"warning: {warning}\n"


@pytest.mark.parametrize("url", ["http://judge:port/v1", "http://[/v1"])
def test_an_address_that_is_none(url: str, sound: list[str]) -> None:
    settings = settings_of(*sound, f"task.judge.urls=['{url}']", "task.judge.model=judge")
    report = CheckReport()
    check_judges(settings, report)
    (error,) = report.errors
    assert error.startswith(f"task.judge.urls={url}: ") and error.endswith("; correct the address") and [error] == refusals(settings)


def test_the_sandbox_where_it_is_used(sound: list[str], judge: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor checks sandbox isolation or the sandbox server only for a task that uses a
    sandbox.
    """
    url = judge[0].removesuffix("/v1")
    monkeypatch.setattr(megatron_rl_sandbox.host_report, "make_report", lambda **_: ("seccomp missing\n\nisolation: not available", False))

    def told(*overrides: str) -> CheckReport:
        report = CheckReport()
        check_sandbox(settings_of(*sound, *overrides), report)
        return report

    assert told().findings == []
    agent = "task.name=visual_python"
    assert told(agent).errors == ["task.sandbox.isolation=auto: isolation: not available; python -m megatron_rl_sandbox doctor shows all"]
    assert told(agent, "task.sandbox.isolation=none").errors == []
    (warning,) = told(agent, "task.sandbox.isolation=none").warnings
    assert warning == "task.sandbox.isolation=none: the policy's code runs without isolation; use auto"
    (error,) = told(agent, f"task.sandbox.url={url}").errors
    assert error.startswith(f"task.sandbox.url={url}: SandboxError: {url}: the server is not a sandbox server or is too busy: BoxClosed: ")
    monkeypatch.setattr(megatron_rl_sandbox.host_report, "make_report", lambda **_: ("a in use b\nc in use d\n", True))
    assert told(agent).findings == [("sandbox", "2 isolation layers in use")]


def test_what_boxes_would_read_is_told(sound: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor warns if the run directory or a data file lies in a folder that code in every
    sandbox can read, such as a project below /usr in a container. That code could read the answers.
    """
    monkeypatch.setattr(megatron_rl_sandbox.host_report, "make_report", lambda **_: ("a in use b\n", True))
    monkeypatch.setattr(megatron_rl_sandbox.mounts, "system_paths", lambda readable=(): [str(tmp_path)])
    questions = tmp_path / "questions.json"
    questions.write_text("[]")
    settings = settings_of(
        *sound, "task.name=visual_python", f"run.dir={tmp_path}/run", f"task.data.train=[{questions}]", "task.data.eval=[]"
    )
    report = CheckReport()
    check_sandbox(settings, report)
    below = f"is below {tmp_path}, which code in every box can read: move it"
    assert report.warnings == [f"run.dir ({tmp_path}/run) {below}", f"task.data.train[0] ({questions}) {below}"]
    monkeypatch.setattr(megatron_rl_sandbox.mounts, "system_paths", lambda readable=(): ["/usr"])
    check_sandbox(settings, clear := CheckReport())
    assert clear.warnings == []


def test_what_is_shown() -> None:
    """The printed report ends with warnings and then errors, and text in square brackets is not
    interpreted as markup.
    """
    report = CheckReport(findings=[("task", "vqa [bold]")], errors=["key=[value]: remedy"], warnings=["odd"])
    out = io.StringIO()
    print_report(report, Console(file=out, width=30))
    assert out.getvalue().splitlines()[-2:] == ["warning: odd", "error: key=[value]: remedy"]
    assert "vqa [bold]" in out.getvalue()


def test_the_exit_code(sound: list[str], tmp_path: Path) -> None:
    """A separate interpreter prints nothing but the report and exits with 0 if a run can start,
    else with 1.
    """
    command = (ROOT / "launch" / "doctor.py", *sound)
    well = fork_server.run_script(*command, cwd=tmp_path, timeout_s=120)
    assert well.returncode == 0 and well.stdout.endswith("\na run can start\n")
    ill = subprocess.run(
        [sys.executable, *map(str, command), "task.data.train=[]"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ill.returncode, ill.stderr) == (1, "")
    error = "error: task.data.train=[]: give the files, JSON lists, JSON lines or Parquet"
    assert ill.stdout.splitlines()[-2:] == [error, "a run cannot start"]


def test_tasks_are_named_as_they_are() -> None:
    """The doctor's lists of tasks name existing tasks. If a task is renamed, rename it in these
    lists too.
    """
    folder = ROOT / "megatron_rl" / "tasks"
    assert all((folder / name).is_dir() or (folder / f"{name}.py").is_file() for name in (*doctor.SANDBOX_TASKS, *doctor.DATA_TASKS))


def test_staleness_without_a_correction_is_warned_of() -> None:
    for words, num in ((["run.max_staleness=2"], 1), (["run.max_staleness=2", "algo.rollout_correction=token_tis"], 0), (["stage=sft"], 0)):
        lines = mismatch_warnings(settings_of("experiment=numberline_grpo_cpu", "model.path=here", *words))
        told = "algo.rollout_correction=none: run.max_staleness=2 trains on tokens sampled by older weights, which may cause collapse; use "
        assert lines == [f"{told}algo.rollout_correction=bypass, and a lower learning rate"] * num


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["model.dtype=bfloat16"], 1),
        (["engine.dtype=bfloat16"], 1),
        (["model.dtype=bfloat16", "algo.rollout_correction=token_tis"], 0),
        (["model.dtype=bfloat16", "algo.rollout_correction=bypass+geo_mask"], 0),
        (["model.dtype=bfloat16", "algo.rollout_correction=sequence_mask+opsm"], 0),
        (["model.dtype=bfloat16", "algo.rollout_correction=opsm"], 1),
        (["model.dtype=bfloat16", "stage=sft"], 0),
        ([], 0),
    ],
)
def test_bfloat16_without_a_correction_is_warned_of(words: list[str], warned: int) -> None:
    lines = mismatch_warnings(settings_of("experiment=numberline_grpo_cpu", "model.path=here", *words))
    told = ("algo.rollout_correction=none: engine and trainer", "algo.rollout_correction=opsm: engine and trainer")
    assert len(lines) == warned and all(line.startswith(told) for line in lines)


def test_pictures_above_the_limit_are_reported(sound: list[str], tmp_path: Path) -> None:
    """Narrow limits are exceeded, because sides are rounded to multiples of 28: 160 x 120 becomes
    168 x 140.
    """
    path = tmp_path / "narrow.json"
    Image.new("RGB", (160, 120)).save(tmp_path / "narrow.png")
    path.write_text(json.dumps([{"question": "<image>What?", "answer": "a", "image": "narrow.png"}] * 2))
    narrow = [f"task.data.train=[{path}]", "model.min_pixels=19200", "model.max_pixels=19200"]
    told = "2 images exceed it, e.g. 160 x 120 becomes 168 x 140 (23520 pixels): sides are multiples of 28; lower model.min_pixels"
    lines = [line for line in run_checks(settings_of(*sound, *narrow)).warnings if line.startswith("task.data.train: model.max_pixels")]
    assert len(lines) == 1 and lines[0].startswith(f"task.data.train: model.max_pixels=19200: {told}")
    assert not run_checks(settings_of(*sound, *narrow[:1])).warnings
