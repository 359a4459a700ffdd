"""Every mistake of mistakes.py produces its one-line error and exit code 1 and leaves no files
behind. Also tests the contents of --help, and that wandb is loaded only if it is enabled.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megatron_rl.cli.config_errors import FOREIGN_NAMES, closest_key, setting_keys
from megatron_rl.cli.help import COMMON_SETTINGS, USAGES, render_help
from megatron_rl.config import Settings
from megatron_rl.config.task_options import NumberLineOptions
from tests.cli.mistakes import MISTAKES
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server

YAMLS = {
    "misspelt": "algo:\n  groop_size: 4\n",
    "wrong": "optim: {lr: fast}\n",
    "broken": "optim:\n  lr: [1\n b: 3\n",
}
QUESTION = '{"question": "How many?", "answer": "4", "images": []}\n'


@pytest.fixture(scope="module")
def broken(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the folder {tmp} of the table, with its broken files."""
    folder = tmp_path_factory.mktemp("broken")
    for name in ("no_tokenizer", "half", "bad_header", "other_model", "other_critic"):
        shutil.copytree(random_model, folder / name)
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    weights = folder / "half" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with (folder / "bad_header" / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 16)
    config = folder / "other_model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "internvl"}))
    config = folder / "other_critic" / "config.json"
    stored = json.loads(config.read_text())
    stored["vision_config"] |= {"patch_size": 16, "window_size": 64}
    config.write_text(json.dumps(stored))
    (folder / "configs" / "experiment").mkdir(parents=True)
    for name, text in YAMLS.items():
        (folder / "configs" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    (folder / "good.jsonl").write_text(QUESTION)
    (folder / "true.jsonl").write_text('{"question": "?", "answer": true}\n')
    (folder / "nan.jsonl").write_text('{"question": "?", "answer": NaN}\n')
    (folder / "web.jsonl").write_text('{"question": "?", "answer": "a", "image": "https://example.com/a.png"}\n')
    (folder / "half.jsonl").write_text(QUESTION + QUESTION[:20])
    (folder / "table.csv").write_text("question,answer\nHow many?,4,5\n")
    (folder / "file").touch()
    return folder


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Yield the address of a server that responds to every request with an HTML page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Welcome</html>")

        do_POST = do_GET

        def log_message(self, *given: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def ends(random_model: Path, broken: Path, page: str) -> dict[str, tuple[int, str]]:
    """Return {mistake: (exit code, standard error)}. One process runs all of them; its working
    directory has a configs/ folder with the broken files.
    """
    given = [f"model.path={random_model}", f"run.dir={broken}/run"]
    wrong = {mistake: mistake.replace("{tmp}", str(broken)).replace("{page}", page).split(" ") for mistake in MISTAKES}
    lines = [
        [*given, *words] if any(word.startswith("task=") for word in words) else [*given, "task=number_line", *words]
        for words in wrong.values()
    ]
    (broken / "lines.json").write_text(json.dumps(lines))
    shutil.copy(SUPPORT / "cli_error_lines.py", broken / "mine.py")
    nobody = {"HOME": str(broken), "NETRC": str(broken / "netrc"), "WANDB_API_KEY": ""}
    process = fork_server.Process(broken / "mine.py", broken / "lines.json", cwd=broken, environment=nobody)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    said = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return dict(zip(MISTAKES, said, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, ends: dict[str, tuple[int, str]], random_model: Path, broken: Path, page: str) -> None:
    code, said = ends[mistake]
    expected = MISTAKES[mistake].replace("{tmp}", str(broken)).replace("{model}", str(random_model)).replace("{page}", page)
    pattern = ".*".join(map(re.escape, expected.split("...")))
    assert re.fullmatch(f"error: {pattern}\n", said), said
    assert code == 1


def test_no_secret_is_told(ends: dict[str, tuple[int, str]]) -> None:
    """No error contains the secret of the mistake that caused it."""
    said = [line for mistake, (_, line) in ends.items() if "SECRET" in mistake]
    assert len(said) >= 7 and not [line for line in said if "SECRET" in line]


def test_nothing_is_left_behind(ends: dict[str, tuple[int, str]], broken: Path) -> None:
    assert len(ends) >= 40
    assert not (broken / "run").exists()


def test_what_others_call_a_setting_is_one_of_ours() -> None:
    """Every name of another trainer maps to an existing setting."""
    assert set(FOREIGN_NAMES.values()) <= set(setting_keys(Settings))


def test_a_key_is_its_own_nearest() -> None:
    """The suggestion for an existing key is that key, unless its last part is another trainer's
    name for a different setting.
    """
    assert not [key for key in setting_keys(Settings) if closest_key(key) not in (key, FOREIGN_NAMES.get(key.rpartition(".")[2]))]


def test_help_is_one_screen_with_examples_and_names() -> None:
    text = render_help([], command="train")
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 140
    assert re.findall(r"^  (\S+)=", text, re.MULTILINE) and all(f"  {key}=" in text for key in COMMON_SETTINGS)
    experiments = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert experiments <= set(re.findall(r"\w+", text)), "every experiment is named"


def test_help_all_lists_every_key_with_its_value_and_meaning() -> None:
    text = render_help(["all", "experiment=numberline_grpo_cpu", "optim.lr=0.5"], command="train")
    listed = re.findall(r"^([a-z_0-9.]+)=(.*)\n    (.+)$", text, re.MULTILINE)
    every = {*setting_keys(Settings)} - {"task.options"} | {*setting_keys(NumberLineOptions, "task.options.")}
    assert sorted(key for key, _, _ in listed) == sorted(every), "those of the task that is chosen, too"
    said = {key: (value, meaning) for key, value, meaning in listed}
    assert said["optim.lr"] == ("0.5", "Peak learning rate of the schedule.")
    assert said["checkpoint.background"][0] == "true" and said["lora.targets"][0] == "[attention,mlp]" and said["lora.path"][0] == "''"


def test_help_of_a_group_lists_that_group() -> None:
    text = render_help(["task.data"], command="train")
    assert re.findall(r"^(\S+)=", text, re.MULTILINE) == [key for key in setting_keys(Settings) if key.startswith("task.data.")]


@pytest.mark.parametrize("command", [name for name in USAGES if name != "train"])
def test_commands_have_their_own_help(command: str) -> None:
    """The help starts with the command's summary, has an example, and fits the screen. With a word,
    it lists settings as that of train does.
    """
    text = render_help([], command=command)
    assert f"python launch/{command.replace('-', '_')}.py " in text
    assert max(map(len, text.splitlines())) <= (140 if command == "doctor" else 100)
    assert text.split()[0] in ("Checks", "Evaluates", "Recomputes", "Serves", "Starts", "Prints")
    assert render_help(["evaluation"], command=command) == render_help(["evaluation"], command="train")


def test_wandb_is_not_loaded_unless_it_is_asked_for() -> None:
    """megatron-core imports wandb whenever it can, so the command line blocks the import. Each
    killed wandb process leaves folders in /tmp.
    """
    script = """
import sys
from megatron_rl.cli.app import load_and_run
def act(settings):
    try:
        import wandb
        print(settings.wandb.mode, wandb.__name__)
    except ImportError:
        print(settings.wandb.mode, "refused")
for mode in ("disabled", "offline"):
    sys.argv = ["mine.py", "task=number_line", "model.path=here", "run.dir=there", f"wandb.mode={mode}"]
    load_and_run(act, {}, command="train")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["disabled refused", "offline wandb"], done.stdout
