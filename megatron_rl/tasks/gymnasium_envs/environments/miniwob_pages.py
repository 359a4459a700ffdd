"""Registers the pages of MiniWoB++ with pictures, as miniwob_pages/NAME-v0.

The policy sees the page (160 x 210 pixels) and the page's task, and answers with a command of
`COMMANDS`. Only the pages are taken from the package miniwob (1.1.0); Chromium is controlled by
chromium.py, and neither selenium nor chromedriver is needed. The package's own environments
(miniwob/NAME-v1) render no pictures.

The reward is the page's raw reward, without the discount for the time that has passed, at the end
of the episode. The pages' limit of 10 seconds is removed, because a policy's replies take longer.
Pages with animations depend on the time, so their episodes do not repeat exactly.
"""

import importlib.util
import json
import string
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from megatron_rl.tasks.gymnasium_envs.environments.chromium import KEY_CODES, ChromiumPage

WIDTH, HEIGHT = 160, 210
MAX_CHARACTERS = 200
MAX_MS = 2_000_000_000
"""Limit of an episode in the page's own clock. JavaScript's timers are limited to 2**31 - 1 ms."""
READY_S = 10.0
"""Maximum time in seconds for a page to be ready after the start of its episode."""
COMMANDS = (
    f"click X Y, double_click X Y, drag X1 Y1 X2 Y2, type TEXT, press KEY ({', '.join(KEY_CODES)}); X below {WIDTH}, Y below {HEIGHT}"
)
NUM_POINTS = {"click": 1, "double_click": 1, "drag": 2}


def find_pages() -> Path:
    """Return the folder of the pages.

    Raises:
        ModuleNotFoundError: The package miniwob is not installed.
    """
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'miniwob'", name="miniwob")
    return Path(spec.submodule_search_locations[0]) / "html" / "miniwob"


class MiniWobPage(gymnasium.Env):
    """One page of MiniWoB++, with commands as actions."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None, *, page: str) -> None:
        self.render_mode, self.url = render_mode, (find_pages() / f"{page}.html").as_uri()
        characters = string.ascii_letters + string.digits + string.punctuation + " "
        self.action_space = spaces.Text(MAX_CHARACTERS, charset=characters)
        self.observation_space = spaces.Dict({"task": spaces.Text(9999), "commands": spaces.Text(999)})
        self.browser: ChromiumPage | None = None
        self.task = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, str], dict[str, Any]]:
        """Load the page and start its episode."""
        super().reset(seed=seed)
        if self.browser is None:
            self.browser = ChromiumPage(width=WIDTH, height=HEIGHT)
        self.browser.open(self.url)
        page_seed = json.dumps(str(self.np_random.integers(2**31)))
        self.browser.evaluate(f"Math.seedrandom({page_seed}); core.EPISODE_MAX_TIME = {MAX_MS}; core.startEpisodeReal()")
        deadline = time.monotonic() + READY_S
        while not self.browser.evaluate("WOB_TASK_READY"):
            if time.monotonic() > deadline:
                raise OSError(f"{self.url} was not ready after {READY_S:g} s")
            time.sleep(0.05)
        stated = self.browser.evaluate("core.getUtterance()")
        self.task = stated["utterance"] if isinstance(stated, dict) else str(stated)
        return self._observe(), {}

    def _observe(self) -> dict[str, str]:
        return {"task": self.task, "commands": COMMANDS}

    def step(self, action: str) -> tuple[dict[str, str], float, bool, bool, dict[str, Any]]:
        """Run a command. A command that does not exist has no effect."""
        assert self.browser is not None, "step before reset"
        name, _, arguments = action.strip().partition(" ")
        points = parse_points(arguments, NUM_POINTS.get(name, 0))
        if name == "type" and arguments:
            self.browser.type_text(arguments)
        elif name == "press" and arguments in KEY_CODES:
            self.browser.press(arguments)
        elif points and name == "drag":
            self.browser.drag(*points)
        elif points:
            self.browser.click(*points[0], count=2 if name == "double_click" else 1)
        is_done, reward = self.browser.evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        info = {"success": reward > 0} if is_done else {}
        return self._observe(), float(reward) if is_done else 0.0, bool(is_done), False, info

    def render(self) -> np.ndarray:
        """Return the page as a picture."""
        assert self.browser is not None, "render before reset"
        return self.browser.screenshot()

    def close(self) -> None:
        """End Chromium."""
        browser, self.browser = self.browser, None
        if browser is not None:
            browser.close()


def parse_points(text: str, num: int) -> list[tuple[float, float]]:
    """Return `num` points that lie on the page; an empty list if the text is anything else."""
    words = text.split()
    if num == 0 or len(words) != 2 * num or not all(word.isascii() and word.isdigit() for word in words):
        return []
    points = [(float(x), float(y)) for x, y in zip(words[::2], words[1::2], strict=True)]
    return points if all(x < WIDTH and y < HEIGHT for x, y in points) else []


for _page in sorted(find_pages().glob("*.html")):
    gymnasium.register(id=f"miniwob_pages/{_page.stem}-v0", entry_point=f"{__name__}:MiniWobPage", kwargs={"page": _page.stem})
