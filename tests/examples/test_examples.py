"""The files in examples/, started as a user starts them, with small settings, on a warm start of a
few SFT steps. Each result is compared with a computation in this file.

The tool agent's training, the training of mcp_tools.py, the LoRA run, the evaluation and the sweep
are marked long. "mcp_server.py" is started by mcp_tools.py.
"""

import asyncio
import json
import re
import runpy
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import yaml
from PIL import Image

from megatron_rl.config import TaskSettings
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.launcher.sweep_file import read_sweep
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.rollout.task import Env
from megatron_rl.tasks.gym_cards.number_line import apply_action
from megatron_rl.tasks.gymnasium_envs.episode import scale_frame
from megatron_rl.types import Rollout
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.sandbox_pool import start_pool

EXAMPLES = ROOT / "examples"
SMALL = ("engine.kv_cache_mib=16", "task.eval_samples=0", "rollouts.keep_best=64", "checkpoint.save_last=false")
GAMES = (*SMALL, "batch.prompts_per_step=4", "batch.group_size=4", "run.steps=1", "task.max_turns=3")
WARM_UP = (
    "stage=sft",
    "experiment=numberline_sft_cpu",
    "sft.splits=[correct]",
    "sft.steps=[40]",
    "sft.batch_size=16",
    "optim.lr=2e-3",
    "sft.num_demonstrations=200",
)
GRAY, BLUE, RED = (128, 128, 128), (0, 0, 255), (255, 0, 0)


def run(script: Path, *arguments: object, folder: Path, timeout_s: float = 240) -> str:
    """Run a script in the folder; return its output, or fail with it."""
    result = fork_server.run_script(script, *arguments, cwd=folder, timeout_s=timeout_s)
    assert result.returncode == 0, f"{script} {arguments}: {result.stdout[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def runs(learning_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Start the examples in a user's folder, two at a time, and return {name: future of its output}
    and the folder.

    NumberLine's warm start and the judge's first command come first; the others need their models.
    """
    home = tmp_path_factory.mktemp("user")
    with ThreadPoolExecutor(2) as pool:

        def begin(name: str, *arguments: object, script: Path | None = None) -> Future[str]:
            return pool.submit(run, script or EXAMPLES / f"{name}.py", *arguments, folder=home)

        model = f"model.path={learning_model}"
        warm = begin("", *WARM_UP, *SMALL, model, "run.dir=warm", "task.max_turns=2", script=ROOT / "launch" / "train.py")
        taught = begin("judge", "stage=sft", *SMALL, model, "sft.steps=[40]", "sft.batch_size=16")
        warm.result()
        base = "model.path=warm/final"
        found = {"own_reward": begin("own_reward", *GAMES, base, "run.dir=own_reward", "run.steps=2")}
        found |= {name: begin(name, *GAMES, base, f"run.dir={name}") for name in ("own_environment", "own_algorithm")}
        taught.result()
        found["judge"] = begin("judge", *SMALL, "run.steps=1")
        found["own_reward"].result()
        found["inspect"] = begin("inspect_rollouts", "own_reward")
        yield SimpleNamespace(home=home, outputs=found)


def recorded(runs: SimpleNamespace, name: str, folder: str = "") -> list[Rollout]:
    """Return the recorded rollouts of a finished run, in the order of its steps."""
    runs.outputs[name].result()
    files = sorted((runs.home / (folder or name) / "rollouts").glob("step_*.jsonl"))
    return [entry.rollout for file in files for entry in read_recorded(file)]


def test_own_reward(runs: SimpleNamespace) -> None:
    """The recorded rewards equal the formula, with the mistakes counted by replaying the recorded
    responses in the rules of NumberLine.
    """
    rollouts = recorded(runs, "own_reward")
    assert len(rollouts) == 32
    for rollout in rollouts:
        current, target = map(int, re.findall(r"\d", rollout.example_id))
        mistakes = 0
        for turn in rollout.turns:
            try:
                (current, _), reward = apply_action((current, target), "-+".index(json.loads(turn.text)["action"]))
            except (ValueError, KeyError, TypeError):
                reward = -1
            mistakes += reward < 0
        assert rollout.reward == pytest.approx(1 / (1 + 2 * mistakes)), rollout.example_id
    assert len({rollout.reward for rollout in rollouts}) > 1, "the episodes differ"


def test_own_environment(runs: SimpleNamespace) -> None:
    """Replaying the recorded responses gives the recorded pictures, rewards and ends. Pictures are
    read by the heights of their colors.
    """
    rollouts = recorded(runs, "own_environment")
    moves = 0
    for rollout in rollouts:
        level, mark = map(int, rollout.example_id)
        distance = abs(level - mark)
        for turn, sequence in zip(rollout.turns, rollout.sequences, strict=True):
            assert read_gauge(sequence.images[0].pil) == (level, mark)
            before, action = abs(level - mark), re.findall(r'"action": "([+-])"', turn.text)
            level = min(max(level + {"+": 1, "-": -1}[action[-1]], 0), 5) if action else level
            moves += len(action) > 0
            assert turn.reward == pytest.approx((1 if abs(level - mark) < before else -1) / distance)
        assert (rollout.stop_reason == "done") == (level == mark)
        assert rollout.reward == pytest.approx(sum(turn.reward for turn in rollout.turns))
    assert len(rollouts) == 16 and moves > 16, "the policy moves the level"


def read_gauge(picture: Image.Image) -> tuple[int, int]:
    """Return level and mark of a picture."""
    column = [picture.getpixel((70, row)) for row in range(140)]
    heights = {color: (130 - column.index(color)) // 24 if color in column else 0 for color in (BLUE, GRAY, RED)}
    low, high = heights[BLUE], max(heights.values())
    return (high, low) if RED in column else (low, high)


def test_own_algorithm(runs: SimpleNamespace) -> None:
    """The recorded advantages equal the formula, by numpy, on every sampled token."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in recorded(runs, "own_algorithm"):
        groups.setdefault(rollout.group, []).append(rollout)
    for members in groups.values():
        rewards = np.array([member.reward for member in members])
        distances = rewards - np.median(rewards)
        expected = distances / (np.abs(distances).mean() + 1e-6)
        for member, value in zip(members, expected, strict=True):
            for sequence in member.sequences:
                assert sequence.advantages == pytest.approx([value * mask for mask in sequence.loss_mask], abs=1e-6)
    assert len(groups) == 4 and any(statistics.pstdev(member.reward for member in members) > 0 for members in groups.values())


def test_judge(runs: SimpleNamespace) -> None:
    """Each reward is the verdict on the recorded answer, by a list of the correct words."""
    rollouts = recorded(runs, "judge", "runs/examples/judge/grpo")
    correct = {"red": "crimson scarlet", "green": "emerald olive", "blue": "navy azure", "yellow": "golden lemon"}
    judged = [rollout for rollout in rollouts if rollout.verdicts]
    for rollout in judged:
        (answer,) = re.findall(r"<answer>(.*)</answer>", rollout.turns[0].text)
        assert rollout.reward == float(answer in correct[rollout.answer].split()), answer
    assert len(judged) > 32 and {rollout.reward for rollout in judged} == {0.0, 1.0}
    assert re.search(r"the judge decided 100% of \d+ answers", runs.outputs["judge"].result())


def test_the_commands_of_gymnasium_environment_fit_together() -> None:
    """The second command reads what the first writes, and the third what the second writes. All
    have the same task, so the demonstrations have the prompts of training.
    """
    example = runpy.run_path(str(EXAMPLES / "gymnasium_environment.py"))
    words = [word for word in example["DEMONSTRATE"] if "=" in word]
    played = compose_settings(["model.path=unused", "run.dir=unused", *words])
    taught, trained = (compose_settings([*example[name], *example["ENVIRONMENT"]]) for name in ("SFT", "RL"))
    out = example["DEMONSTRATE"][example["DEMONSTRATE"].index("--out") + 1]
    assert taught.task.data.demonstrations == [f"{out}/transcripts.jsonl"] and trained.model.path == f"{taught.run.dir}/final"
    assert played.task.options == taught.task.options == trained.task.options
    assert played.task.max_turns == taught.task.max_turns == trained.task.max_turns == 10


@pytest.mark.long
@pytest.mark.skipif(find_spec("minigrid") is None, reason="minigrid is not installed")
def test_gymnasium_environment(learning_model: Path, tmp_path: Path) -> None:
    """Every recorded picture of the trained policy is MiniGrid's own frame after the recorded
    actions, and the reward is that of gymnasium.
    """
    script = EXAMPLES / "gymnasium_environment.py"
    assert "2 of 2 episodes solved" in run(script, "demonstrate", folder=tmp_path)
    run(script, "stage=sft", f"model.path={learning_model}", *SMALL, "sft.steps=[20]", "sft.batch_size=8", folder=tmp_path)
    run(script, *SMALL, "run.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", folder=tmp_path)
    (file,) = (tmp_path / "runs" / "examples" / "gymnasium_environment" / "grpo" / "rollouts").glob("step_*.jsonl")
    rollouts = [entry.rollout for entry in read_recorded(file)]
    for rollout in rollouts:
        env = gymnasium.make("minigrid:MiniGrid-Empty-Random-5x5-v0", render_mode="rgb_array", max_steps=10)
        env.reset(seed=int(rollout.example_id.removeprefix("seed")))
        rewards = []
        for turn, sequence in zip(rollout.turns, rollout.sequences, strict=True):
            assert np.array_equal(sequence.images[0].pil, scale_frame(env.render(), 140))
            assert turn.tool_call is not None
            rewards.append(float(env.step(env.unwrapped.actions[turn.tool_call.source])[1]) if turn.tool_call.ran else 0.0)
        assert [turn.reward for turn in rollout.turns] == pytest.approx(rewards)
    assert len(rollouts) == 4


def shown_color(picture: Image.Image) -> str:
    """Return the name of the only color of a picture."""
    ((_, color),) = picture.convert("RGB").getcolors()
    return {(255, 0, 0): "red", (0, 128, 0): "green", (0, 0, 255): "blue", (0, 0, 0): "black"}[color]


def test_mcp_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The transcripts contain the tool, the call, the server's picture of the dot, and the answer."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "mcp_tools.py")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(example.demonstrate.__globals__, "NUM_DOTS", 2)
    asyncio.run(example.demonstrate())
    folder = tmp_path / "runs" / "examples" / "mcp_tools"
    rows = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for number, (row, color) in enumerate(zip(rows, ("red", "black"), strict=True)):
        system, question, call, observation, answer = [message["content"] for message in row["messages"]]
        assert '"name": "show_dot", "description": "Show a dot, given its number."' in system
        assert (question, answer) == (f"What color is dot {number}?", f"<answer>{color}</answer>")
        assert json.loads(call.split("\n")[1]) == {"name": "show_dot", "arguments": {"number": number}}
        assert observation == "<tool_response>\n\n<image>\n</tool_response>"
        (path,) = row["images"]
        assert shown_color(Image.open(folder / path)) == color


@pytest.mark.long
def test_mcp_tools_training(learning_model: Path, tmp_path: Path) -> None:
    """After the warm start, the policy calls the tool, and every picture in a recorded rollout is
    that of the dot in the call.
    """
    script = EXAMPLES / "mcp_tools.py"
    run(script, "demonstrate", folder=tmp_path)
    run(script, "stage=sft", f"model.path={learning_model}", *SMALL, "sft.steps=[40]", folder=tmp_path)
    run(script, *SMALL, "run.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", folder=tmp_path)
    (file,) = (tmp_path / "runs" / "examples" / "mcp_tools" / "grpo" / "rollouts").glob("step_*.jsonl")
    num_pictures = 0
    for rollout in (entry.rollout for entry in read_recorded(file)):
        for turn in rollout.turns:
            for picture in turn.images:
                number = json.loads(turn.tool_call.source)["number"]
                assert shown_color(picture.pil) == ("red", "green", "blue", "black")[(number * 7 + number // 3) % 4]
                num_pictures += 1
    assert num_pictures > 0


@pytest.mark.long
def test_evaluate_and_compare(runs: SimpleNamespace) -> None:
    """The printed success rates and their difference equal the means over the recorded examples."""
    runs.outputs["own_reward"].result()
    given = ("warm/final", "own_reward/final", "--samples", 1, "--turns", 3, "--out", "scores")
    output = run(EXAMPLES / "evaluate_and_compare.py", *given, folder=runs.home)
    rates = []
    for name in ("warm_final", "own_reward_final"):
        lines = (runs.home / "scores" / name / "examples.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 30
        rates.append(statistics.fmean(statistics.fmean(map(float, row["solved"])) for row in rows))
        assert re.search(rf"scores/{name}\s*│\s*30\s*│\s*{rates[-1]:.1%} ", output), output
    assert f"{100 * (rates[1] - rates[0]):+.1f} (" in output


def test_inspect_rollouts(runs: SimpleNamespace) -> None:
    """The printed table contains the means of metrics.jsonl, and the file is a notebook whose cells
    compile.
    """
    output = runs.outputs["inspect"].result()
    for step in read_metrics(runs.home / "own_reward" / "metrics.jsonl")[:-1]:
        assert re.search(rf"^{step['step']:.0f} +16 +{step['reward/mean']:.3f} ", output, re.MULTILINE), output
    worst = min(rollout.reward for rollout in recorded(runs, "own_reward")[16:])
    assert re.search(rf"worst rollout of step 1: current\d_target\d, reward {worst:.3f}, ", output)
    assert Image.open(runs.home / "own_reward" / "rollouts.png").size == (560, 210)
    cells = re.split(r"^# %%", (EXAMPLES / "inspect_rollouts.py").read_text(), flags=re.MULTILINE)
    assert len(cells) > 6 and all(compile("#" + cell, "cell", "exec") for cell in cells)


def test_tool_agent_sees_the_crop() -> None:
    """In a real sandbox, the demonstrated code returns the crop of the original picture, and the
    demonstration contains the same pixels. An answer ends the episode; only the right one earns 1.
    """
    example = runpy.run_path(str(EXAMPLES / "tool_agent.py"))
    task = example["DotTask"](TaskSettings(name="dot"))
    for running in start_pool(size=1):
        task.pool = running.pool
        blue = next(each for each in task.examples("train") if each.id == "blue")
        prompt, look, end = running.run_coroutine(play(task.env(blue), example["CODE"], task.protocol.write_code))
    (crop,) = images_in(look.messages)
    assert crop.size == (40, 40) and sorted(crop.getcolors()) == [(144, (30, 30, 220)), (1456, (255, 255, 255))]
    assert [picture.size for picture in images_in(prompt)] == [(1400, 1400)] and end.done
    (_, shown) = images_in(task.demonstrate("blue", guess="").messages)
    assert np.array_equal(np.asarray(shown), np.asarray(crop))
    assert [example["right"](f"\\boxed{{{word}}}", "blue") for word in ("blue", "red")] == [1.0, 0.0]
    guesses = [len(each.messages) == 3 for each in task.demonstrations("train", num=400, seed=0)]
    assert statistics.fmean(guesses) == pytest.approx(0.5, abs=0.08)


async def play(env: Env, code: str, write_code: Callable[[str], str]) -> tuple:
    """Run the code, then answer; return the prompt and both steps."""
    prompt = await env.reset(0)
    try:
        return prompt, await env.step(write_code(code)), await env.step("<answer>\n\\boxed{blue}\n</answer>")
    finally:
        await env.close()


def images_in(messages: list) -> list[Image.Image]:
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]


def test_the_notebook_runs(learning_model: Path, tmp_path: Path) -> None:
    """The cells of the notebook run one after the other in a running event loop, as in Jupyter,
    with fewer steps. The warm start learns, and the scores are those of the evaluation's files.
    """
    cells = json.loads((EXAMPLES / "train_from_python.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    changes = {
        "sft_steps=[14]": "sft_steps=[6]",
        "run_steps=40": "run_steps=2",
        "samples=8, ": "samples=2, ",
        "\nevaluate(": "\nscores = evaluate(",
    }
    for written, smaller in {**changes, "runs/quickstart/nano": str(learning_model)}.items():
        assert source.count(written) == 1, written
        source = source.replace(written, smaller)
    ends = "\nimport json; json.dump({'scores': scores, 'curve': curve}, open('told.json', 'w'))"
    script = tmp_path / "notebook.py"
    script.write_text(f"import asyncio\n\nasync def main():\n    exec({source!r} + {ends!r}, {{}})\n\nasyncio.run(main())\n")
    ended = fork_server.Process(script, cwd=tmp_path, environment={"MPLBACKEND": "Agg"})
    try:
        output, _ = ended.communicate(280)
    finally:
        ended.kill()
    assert ended.returncode == 0 and "Warning" not in output, output[-6000:]
    told, home = json.loads((tmp_path / "told.json").read_text()), tmp_path / "runs" / "notebook"
    assert told["scores"].items() <= json.loads((home / "evaluation" / "evaluation.json").read_text())["scores"].items()
    assert told["curve"] == [line["reward/mean"] for line in read_metrics(home / "grpo" / "metrics.jsonl")[:-1]]
    losses = [line["loss"] for line in read_metrics(home / "sft" / "metrics.jsonl")[:-1]]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]


def test_sweep_composes() -> None:
    """The sweep has one run for each combination, with valid settings."""
    tasks = read_sweep(EXAMPLES / "sweep.yaml").tasks
    chosen = [compose_settings(task.overrides) for task in tasks]
    assert {(each.algo.name, each.optim.lr) for each in chosen} == {(algo, lr) for algo in ("grpo", "rloo") for lr in (1e-4, 4e-4)}
    assert len({each.run.dir for each in chosen}) == len(chosen) == 4


@pytest.mark.parametrize("name", ["own_reward", "own_environment", "own_algorithm", "lora_and_export", "judge", "tool_agent"])
def test_a_missing_model(name: str, tmp_path: Path) -> None:
    """Without the model, an example ends with one line that names the command which creates it."""
    given = ["stage=sft"] if name in ("judge", "tool_agent") else []
    ended = fork_server.run_script(EXAMPLES / f"{name}.py", *given, cwd=tmp_path, timeout_s=60)
    assert ended.returncode == 1 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"error: model.path=runs/quickstart/\S+: no such folder; bash launch/quickstart.sh creates it\n", ended.stdout)


@pytest.mark.long
def test_lora_and_export(learning_model: Path, tmp_path: Path) -> None:
    """The exported model equals the run's own merge, and differs from the base model only in the
    adapted matrices. The entropy bonus gives a gradient where all rewards are equal.
    """
    output = run(EXAMPLES / "lora_and_export.py", *GAMES, f"model.path={learning_model}", "algo.entropy_coef=0.1", folder=tmp_path)
    folder = tmp_path / "runs" / "examples" / "lora"
    merged, final, base = HfTensors(folder / "merged"), HfTensors(folder / "final"), HfTensors(learning_model)
    assert merged.specs.keys() == final.specs.keys() == base.specs.keys()
    differences = {name: (merged.read(name) - final.read(name)).abs().max().item() for name in final.specs}
    assert max(differences.values()) <= 1e-6
    assert f"at most {max(differences.values()):.1e}" in output
    changed = {name for name in base.specs if (merged.read(name) - base.read(name)).abs().max() > 0}
    assert changed and all(re.search(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$", name) for name in changed)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_tool_agent_learns(learning_model: Path, tmp_path: Path) -> None:
    """The warm start, then 10 GRPO steps: the mean reward and the use of the tool rise, and every
    reward equals that of the recorded answer.
    """
    run(EXAMPLES / "tool_agent.py", "stage=sft", f"model.path={learning_model}", folder=tmp_path, timeout_s=1500)
    run(EXAMPLES / "tool_agent.py", "run.steps=10", "rollouts.keep_best=128", folder=tmp_path, timeout_s=1500)
    folder = tmp_path / "runs" / "examples" / "tool_agent" / "grpo"
    first, *_, last = read_metrics(folder / "metrics.jsonl")[:-1]
    assert last["reward/mean"] >= first["reward/mean"] + 0.1 and last["rollout/tool_use"] >= first["rollout/tool_use"] + 0.1
    for file in (folder / "rollouts").glob("step_*.jsonl"):
        for rollout in (entry.rollout for entry in read_recorded(file)):
            assert rollout.reward == (f"boxed{{{rollout.answer}}}" in rollout.turns[-1].text)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_sweep_runs(random_model: Path, tmp_path: Path) -> None:
    """The sweep with one step per run: the table's row of each run equals the run's eval.json."""
    sweep = yaml.safe_load((EXAMPLES / "sweep.yaml").read_text())
    small = [f"model.path={random_model}", "engine.kv_cache_mib=16", "run.steps=1", "task.max_turns=1", "batch.prompts_per_step=2"]
    sweep |= {"overrides": sweep["overrides"] + small, "folder": str(tmp_path / "runs")}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep))
    run(ROOT / "launch" / "sweep.py", file, "--local", 2, folder=tmp_path, timeout_s=1500)
    table = run(ROOT / "launch" / "sweep_report.py", file, folder=tmp_path)
    for task in read_sweep(file).tasks:
        told = json.loads((task.folder / "eval.json").read_text())
        cells = [*task.parameters.values(), f"{told['greedy_success']:.1%}", f"{told['sampled_success']:.1%}", "1/1"]
        assert re.search(r"\s*│\s*".join(map(re.escape, [str(task.index), *cells])), table), table
