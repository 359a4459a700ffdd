"""Adapters of environments of other packages, and the headless Chromium of MiniWoB's pages.

Environments that are not installed (launch/install_environments.sh) are skipped.
"""

import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.tasks.gymnasium_envs.environment_client import load_grammar
from megatron_rl.tasks.gymnasium_envs.environments.chromium import NAMES, ChromiumPage
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumTask
from tests.conftest import ROOT
from tests.tasks.test_gymnasium_env import pictures_of, run_all, texts_of

needs_chromium = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no chromium here: apt-get install chromium")
PAGE = """<body style="margin: 0; background: rgb(10, 200, 30)">
<input id="text" style="position: absolute; left: 10px; top: 10px; width: 80px; height: 20px">
<button id="button" style="position: absolute; left: 10px; top: 60px; width: 80px; height: 40px">go</button>
<script>
var events = [];
button.onclick = () => { events.push("click"); document.body.style.background = "rgb(200, 10, 30)"; };
button.ondblclick = () => events.push("double");
onkeydown = event => events.push(event.key);
onmousedown = event => events.push(`down ${event.clientX} ${event.clientY}`);
onmouseup = event => events.push(`up ${event.clientX} ${event.clientY}`);
function ask() { events.push("asked"); return confirm("?"); }
</script>"""


@needs_chromium
def test_a_page_is_seen_clicked_and_typed_into(tmp_path: Path) -> None:
    """The page's own event handlers record what the browser does."""
    (tmp_path / "page.html").write_text(PAGE)
    page = ChromiumPage(width=120, height=160)
    try:
        page.open((tmp_path / "page.html").as_uri())
        picture = page.screenshot()
        assert picture.shape == (160, 120, 3) and picture.dtype == np.uint8 and picture[150, 110].tolist() == [10, 200, 30]
        page.click(50, 20)
        page.type_text("Ab c")
        page.press("Backspace")
        page.press("Enter")
        assert page.evaluate("text.value") == "Ab "
        assert page.evaluate("events.splice(0)") == ["down 50 20", "up 50 20", "A", "b", " ", "c", "Backspace", "Enter"]
        page.click(50, 80, count=2)
        assert page.evaluate("events.splice(0)") == ["down 50 80", "up 50 80", "click", "down 50 80", "up 50 80", "click", "double"]
        assert page.screenshot()[150, 110].tolist() == [200, 10, 30]
        page.drag((5, 130), (100, 150))
        assert page.evaluate("events.splice(0)") == ["down 5 130", "up 100 150"]
        assert page.evaluate("[ask(), events]") == [True, ["asked"]], "dialogs are accepted"
        with pytest.raises(RuntimeError, match="JavaScript: .* in nothing_here"):
            page.evaluate("nothing_here")
        with pytest.raises(OSError, match="no_page.html: net::ERR_FILE_NOT_FOUND"):
            page.open((tmp_path / "no_page.html").as_uri())
    finally:
        page.close()
    assert not psutil.pid_exists(page._process.pid) and not Path(page._profile.name).exists()


HOLD = """
import time
from megatron_rl.tasks.gymnasium_envs.environment_client import load_grammar
from megatron_rl.tasks.gymnasium_envs.environments.chromium import ChromiumPage
page = ChromiumPage(width=100, height=100)
print(page._process.pid, page._profile.name, flush=True)
time.sleep(60)
"""


@needs_chromium
def test_no_browser_is_left_when_its_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as held:
        pid, folder = held.stdout.readline().split()
        browser = psutil.Process(int(pid))
        everyone = [browser, *browser.children(recursive=True)]
        held.kill()
    assert len(everyone) > 1 and not psutil.wait_procs(everyone, timeout=20)[1]
    shutil.rmtree(folder, ignore_errors=True)


def test_without_chromium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="^needs Chromium, but none of chromium, .* is in PATH; Debian: apt-get install chromium$"):
        ChromiumPage(width=100, height=100)


def test_an_import_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for environments that load OpenGL when they are imported, on a machine without it."""
    (tmp_path / "opengl_environments.py").write_text("raise ImportError('Library GL not found.\\nInstall it.')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^task.options.id=opengl_environments:A-v0: could not be created and .*: Install it\.$"):
        load_grammar(GymnasiumOptions(id="opengl_environments:A-v0"))


def make_task(full_id: str) -> GymnasiumTask:
    return GymnasiumTask(TaskSettings(name="gymnasium", options=GymnasiumOptions(id=full_id, image_side=0, train_seeds=3)))


@pytest.mark.parametrize(
    ("module", "full_id", "action"),
    [
        ("pygame", "FrozenLake-v1", 1), ("pygame", "CartPole-v1", 1), ("minigrid", "MiniGrid-Empty-5x5-v0", "forward"),
        ("ale_py", "ALE/Pong-v5", "RIGHT"), ("crafter", "CrafterReward-v1", "noop"), ("miniworld", "MiniWorld-Hallway-v0", "move_forward"),
    ],
)  # fmt: skip
def test_an_environment_works_from_its_id(module: str, full_id: str, action: object) -> None:
    """Two steps and their repetition with the same seed: equal pictures and rewards."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: bash launch/install_environments.sh")
    replies = [json.dumps({"action": action})] * 2
    (first, steps), (again, more) = run_all(make_task(full_id), (replies, 1, 0), (replies, 1, 0))
    assert [step.reward for step in steps] == [step.reward for step in more] and all(step.tool_call.ran for step in steps)
    for message, repeated in ((first, again), (steps[0].messages[0], more[0].messages[0])):
        assert np.array_equal(*pictures_of(message), *pictures_of(repeated))
    assert min(pictures_of(first)[0].shape[:2]) >= 128


def test_crafter_ends_by_death_or_length() -> None:
    """The limit on the length truncates; the player's death terminates."""
    pytest.importorskip("crafter", reason="crafter is not installed: bash launch/install_environments.sh")
    from megatron_rl.tasks.gymnasium_envs.environments.crafter_world import Crafter

    env = Crafter(length=2)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (False, True)]
    env.reset(seed=0)
    env.world._player.health = 0
    assert env.step(0)[2:4] == (True, False)


def test_commands_of_a_page() -> None:
    pytest.importorskip("miniwob", reason="miniwob is not installed: bash launch/install_environments.sh")
    from megatron_rl.tasks.gymnasium_envs.environments.miniwob_pages import parse_points

    assert parse_points("3 4", 1) == [(3.0, 4.0)] and parse_points("1 2 159 209", 2) == [(1.0, 2.0), (159.0, 209.0)]
    assert parse_points("3 4", 0) == []
    for text in ("160 4", "3 210", "3", "3 4 5 6", "-1 4", "1.5 4", "a b", "", "\u0663 4"):
        assert parse_points(text, 1) == []


@pytest.mark.long
@needs_chromium
@pytest.mark.skipif(find_spec("miniwob") is None, reason="miniwob is not installed: bash launch/install_environments.sh")
def test_pages_are_solved_by_clicks_and_typing() -> None:
    """A script that reads the page finds the button and the text field, and solves click-test and
    enter-text by commands. In other episodes, the reply is sent through the task.
    """
    from megatron_rl.tasks.gymnasium_envs.environments.miniwob_pages import MiniWobPage

    def center(env: MiniWobPage, element: str) -> str:
        script = f"(() => {{ const box = {element}.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] }})()"
        return " ".join(str(round(value)) for value in env.browser.evaluate(script))

    for page, seed in (("click-test", 0), ("click-test", 1), ("enter-text", 0), ("enter-text", 1)):
        env = MiniWobPage(page=page)
        observation, _ = env.reset(seed=seed)
        try:
            assert env.render().shape == (210, 160, 3) and "click X Y" in observation["commands"]
            if page == "enter-text":
                word = observation["task"].split('"')[1]
                assert env.step(f"click {center(env, 'tt')}")[1:3] == (0.0, False)
                assert env.step(f"type {word}")[1:3] == (0.0, False) and env.browser.evaluate("tt.value") == word
                assert env.step("fly away")[1:3] == (0.0, False), "a command that does not exist"
            _, reward, is_terminated, _, info = env.step(f"click {center(env, 'subbtn')}")
            assert (reward, is_terminated, info) == (1.0, True, {"success": True})
        finally:
            env.close()
    wrong = MiniWobPage(page="enter-text")
    wrong.reset(seed=0)
    assert wrong.step(f"click {center(wrong, 'subbtn')}")[1:] == (-1.0, True, False, {"success": False})
    time.sleep(0.1)
    wrong.close()
    rng = random.Random(0)
    clicks = [json.dumps({"action": f"click {rng.randrange(160)} {rng.randrange(50, 210)}"}) for _ in range(20)]
    task = make_task("miniwob_pages/click-test-v0")
    (first, steps), (again, _) = run_all(task, (clicks, 0, 0), ([], 0, 0))
    assert texts_of(first)[0].startswith("task: Click the button.\ncommands: click X Y, ")
    assert np.array_equal(*pictures_of(first), *pictures_of(again)) and all(step.tool_call.ran for step in steps)
    assert asyncio.run(task.close()) is None
