"""Client side of environment_server.py: the check before a run, and the pool of processes."""

import json
import signal
import subprocess
import sys
from typing import Any

from megatron_rl.config import require
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.tasks.gymnasium_envs.action_grammar import ActionGrammar
from megatron_rl.tasks.process_pool import LOAD_TIMEOUT_S, ProcessKind, ProcessPool, server_environment

TIMEOUT_KEY = "task.options.step_timeout_s"
ENVIRONMENT = ProcessKind(
    label="the environment",
    server_module="megatron_rl.tasks.gymnasium_envs.environment_server",
    timeout_key=TIMEOUT_KEY,
    max_answer_bytes=256 << 20,
    environment={"OMP_NUM_THREADS": "1", "PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_VIDEODRIVER": "dummy", "PYGLET_HEADLESS": "1"},
)


def encode_spec(options: GymnasiumOptions) -> str:
    """Return the options that the environment's process needs, as JSON (EpisodeSpec)."""
    return json.dumps({"id": options.id, "kwargs": options.kwargs, "image_side": options.image_side, "actions": options.actions})


def make_environment_pool(options: GymnasiumOptions) -> ProcessPool:
    """Return a pool of processes, each of which runs one episode."""
    return ProcessPool(options.processes, kind=ENVIRONMENT, timeout_s=options.step_timeout_s)


def load_grammar(options: GymnasiumOptions) -> ActionGrammar:
    """Create and reset the environment in its own process, and return the grammar of its actions.

    Raises:
        ValueError: The environment cannot be run. The message has one line.
    """
    limit = f"{options.step_timeout_s:g} s ({TIMEOUT_KEY})"
    command = [sys.executable, "-m", ENVIRONMENT.server_module, "check", str(options.step_timeout_s), encode_spec(options)]
    try:
        checked = subprocess.run(
            command, env=server_environment(ENVIRONMENT), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=options.step_timeout_s + LOAD_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise ValueError(f"task.options.id={options.id}: could not be created and reset within {limit}") from late
    took_long = checked.returncode == -signal.SIGALRM
    require(not took_long, "task.options.id", options.id, f"could not be created and reset within {limit}")
    crashed = f"crashed with signal {-checked.returncode} when it was created and reset; task.options.kwargs={options.kwargs}"
    require(checked.returncode >= 0, "task.options.id", options.id, crashed)
    last = next((line for line in reversed(checked.stderr.splitlines()) if line.strip()), "no error message")
    failed = f"could not be created and reset with task.options.kwargs={options.kwargs}: {last}"
    require(checked.returncode == 0 and bool(checked.stdout), "task.options.id", options.id, failed)
    answer: dict[str, Any] = json.loads(checked.stdout)
    key, value, remedy = answer.get("refused", ("", "", ""))
    require("grammar" in answer, key, value, remedy)
    grammar = ActionGrammar(**answer["grammar"])
    if options.reply == "tags":
        remedy = f"supports only Discrete actions, but an action of {options.id} is {grammar.describe()}; use json"
        require(not grammar.is_list and not grammar.characters, "task.options.reply", "tags", remedy)
        unfit = next((name for name in grammar.names if "," in name or "<" in name or name != name.strip()), None)
        remedy = "a name contains a comma, a < or outer blanks, which task.options.reply=tags cannot separate; name the actions differently"
        require(unfit is None, "task.options.actions", unfit, remedy)
    return grammar
