"""35 mistakes that a newcomer made in a trial, each with what the program must say about it.

The mistakes are those of benchmarks/results/newcomer_2026-11-27.md. A mistake ends with exit code 1
and an error line, or with a warning, and never with a traceback. Run by hand with `-m long`.
"""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.support import fork_server

pytestmark = pytest.mark.long
TRAIN, DOCTOR, COMMAND = ROOT / "launch" / "train.py", ROOT / "launch" / "doctor.py", ROOT / "megatron_rl" / "__main__.py"
GAME = ("task=number_line", "model={nano}", "run.dir={home}/{number}", "engine.kv_cache_mib=16")
ROWS = ("task=vqa", "model={nano}", "run.dir={home}/{number}", "task.data.train=[{home}/rows.jsonl]", "task.data.eval=[{home}/rows.jsonl]")
SMALL = (
    "run.steps=1",
    "batch.prompts_per_step=2",
    "batch.group_size=2",
    "task.max_turns=1",
    "task.max_new_tokens=4",
    "engine.kv_cache_mib=16",
)


@dataclass(frozen=True)
class Mistake:
    """A command line and a pattern that its output must contain."""

    said: str
    words: tuple[str, ...]
    script: Path = TRAIN
    ranks: int = 1
    code: int = 1


MISTAKES = {
    "a misspelt key": Mistake(r"error: batch.groupsize=4: no such key; did you mean batch.group_size\?", (*GAME, "batch.groupsize=4")),
    "a key of another group": Mistake(r"error: optimizer.lr=1: no such key; did you mean optim.lr\?", (*GAME, "optimizer.lr=1")),
    "flags": Mistake(r"write experiment=x model.path=y|write model.path=y", ("--experiment", "x", "--model.path", "y")),
    "a misspelt recipe": Mistake(r"did you mean numberline_grpo_cpu", ("experiment=numberline_grpo",)),
    "no such model folder": Mistake(r"error: model.path=/nowhere: no such folder \(looked in /nowhere\)", (*GAME, "model.path=/nowhere")),
    "a name of the hub": Mistake(r"hf download Qwen/Qwen2.5-VL-3B-Instruct", (*GAME, "model.path=Qwen/Qwen2.5-VL-3B-Instruct")),
    "the wrong order of stages": Mistake(r"quickstart", ("experiment=numberline_grpo_cpu", "run.dir={home}/{number}")),
    "no such data file": Mistake(r"task.data.train=.*nofile.jsonl: no such file", (*ROWS, "task.data.train=[nofile.jsonl]")),
    "a list without brackets": Mistake(r"expects a list; write 'task.data.train=\[a.jsonl\]'", (*GAME, "task.data.train=a.jsonl")),
    "pictures behind a link": Mistake(r"task.data.image_roots", (*ROWS, "task.data.train=[{home}/linked/rows.jsonl]")),
    "other column names": Mistake(
        r"no answer \(all 40 rows\). Columns: filename, question, label. Choose one: 'task.data.columns=\{answer: label\}'",
        (*ROWS, "task.data.train=[{home}/wrong.csv]"),
        DOCTOR,
    ),
    "a picture column of another name": Mistake(
        r"task.data.columns=\{images: my_photos\}", (*ROWS, "task.data.train=[{home}/photos.csv]"), DOCTOR
    ),
    "a context that is too short": Mistake(r"raise engine.max_model_len", (*ROWS, "engine.max_model_len=16"), DOCTOR),
    "a context that is too long": Mistake(
        r"engine.max_model_len=99999: the model supports at most 4096", (*GAME, "engine.max_model_len=99999")
    ),
    "heads that cannot be divided": Mistake(
        r"^error: parallel.tp=3: does not divide the model's 4 attention heads; use one of 1, 2$", (*GAME, "parallel.tp=3"), ranks=3
    ),
    "two ranks are needed": Mistake(
        r"error: parallel.tp\*parallel.pp=2: must divide the number of processes \(1\); set torchrun's --nproc_per_node",
        (*GAME, "parallel.tp=2"),
    ),
    "a language model": Mistake(r"config.json has model_type llama; supported: ", (*GAME, "model.path={home}/llama")),
    "no model": Mistake(r"error: model.path=\?\?\?: has no default", ("task=number_line", "run.dir={home}/{number}")),
    "a misspelt algorithm": Mistake(r"did you mean reinforce_pp", (*GAME, "algo=reinforce")),
    "a word for a number": Mistake(r"error: optim.lr=fast: expects a number", (*GAME, "optim.lr=fast")),
    "a group of one": Mistake(r"error: batch.group_size=1: must be at least 2", (*GAME, "batch.group_size=1")),
    "prompts that cannot be split": Mistake(
        r"batch.prompts_per_step=7: must be divisible by batch.minibatches=4", (*GAME, "batch.prompts_per_step=7", "batch.minibatches=4")
    ),
    "a reward that raises": Mistake(r"reward bad on train/\d: IndexError.*bad.py:3", (*ROWS, "task.reward=bad", *SMALL), Path("bad.py")),
    "a reward with TRL's arguments": Mistake(r"done: ", (*ROWS, "task.reward=bad", *SMALL), Path("trl.py"), code=0),
    "no held-out data": Mistake(r"task.data.eval=\[\]: set the files that contain the held-out questions", (*ROWS, "task.data.eval=[]")),
    "a KV cache of 1 MiB": Mistake(r"engine.kv_cache_mib=1: too small for engine.max_model_len=\d+", (*GAME, "engine.kv_cache_mib=1")),
    "a KV cache of 9 TB": Mistake(r"error: engine.kv_cache_mib=9000000: ", (*GAME, "engine.kv_cache_mib=9000000")),
    "other settings in the same folder": Mistake(
        r"contains a run with other settings: optim.lr=0.5 \(was 1e-06\); set run.overwrite=true",
        (*GAME, "run.dir={home}/old", *SMALL, "optim.lr=0.5"),
    ),
    "W&B without a key": Mistake(r"wandb.mode=online.*wandb login", (*GAME, "wandb.mode=online")),
    "no transcripts": Mistake(r"task.data.demonstrations=\[\]: set the transcript files", (*ROWS, "stage=sft", "sft.splits=[transcripts]")),
    "a judge that is down": Mistake(
        r"no judge is available \(http://127.0.0.1:9/v1: ConnectError",
        (*ROWS, "judge=text", "task.judge.urls=[http://127.0.0.1:9/v1]"),
        DOCTOR,
    ),
    "a port that is taken": Mistake(r"--port={port}: .*choose another", ("viewer", "{home}/old", "--port", "{port}"), COMMAND, code=2),
    "no such run": Mistake(r"error: RUN=/nowhere: no such folder", ("viewer", "/nowhere"), COMMAND, code=2),
    "a module for an adapter": Mistake(
        r"lora.targets=q_proj: choose one of attention, mlp, vision, projector", (*GAME, "lora.rank=4", "lora.targets=[q_proj]")
    ),
    "rewards that are all equal": Mistake(
        r"nothing was learned", (*ROWS, *SMALL, "run.steps=2", "task.reward=bad"), Path("zero.py"), code=0
    ),
}
SCRIPT = "from megatron_rl.cli import cli\ndef {}:\n    return {}\ncli(rewards={{'bad': bad}})\n"
SCRIPTS = {
    "bad.py": SCRIPT.format("bad(reply, answer)", "[][0]"),
    "trl.py": SCRIPT.format("bad(completions, **kwargs)", "[float(len(each)) for each in completions]"),
    "zero.py": SCRIPT.format("bad(reply, answer)", "0.0"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Create the files that the command lines name."""
    home = tmp_path_factory.mktemp("newcomer")
    (home / "elsewhere").mkdir()
    (home / "linked").mkdir()
    Image.new("RGB", (56, 56), "red").save(home / "red.png")
    Image.new("RGB", (56, 56), "red").save(home / "elsewhere" / "red.png")
    (home / "linked" / "red.png").symlink_to(home / "elsewhere" / "red.png")
    row = {"question": "What color?", "answer": "red", "images": ["red.png"]}
    for folder in (home, home / "linked"):
        (folder / "rows.jsonl").write_text(4 * f"{json.dumps(row)}\n")
    (home / "wrong.csv").write_text("filename,question,label\n" + 40 * "red.png,What color?,red\n")
    (home / "photos.csv").write_text("my_photos,question,answer\n" + 40 * "red.png,What color?,red\n")
    (home / "llama").mkdir()
    (home / "llama" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    for name, text in SCRIPTS.items():
        (home / name).write_text(text)
    words = fill(("run.dir={home}/old", *GAME[:2], *SMALL), home, random_model, port=0)
    assert fork_server.run_script(TRAIN, *words, cwd=home, timeout_s=200).returncode == 0
    return home


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def fill(words: tuple[str, ...], home: Path, model: Path, *, port: int, number: int = 0) -> list[str]:
    words = tuple(word.replace("{number}", str(number)) for word in words)
    filled = [
        word.replace("model={nano}", f"model.path={model}").replace("{home}", str(home)).replace("{port}", str(port)) for word in words
    ]
    keys = [word.partition("=")[0] for word in filled]
    # The mistake replaces the value that the other command lines have.
    return [word for index, word in enumerate(filled) if keys[index] not in keys[index + 1 :] or word.startswith("-")]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_newcomers_mistake_ends_clearly(name: str, home: Path, random_model: Path, port: int) -> None:
    mistake = MISTAKES[name]
    script = home / mistake.script if not mistake.script.is_absolute() else mistake.script
    words = fill(mistake.words, home, random_model, port=port, number=list(MISTAKES).index(name))
    if mistake.ranks > 1:
        result = fork_server.run_world(mistake.ranks, script, *words, timeout_s=200)
    else:
        result = fork_server.run_script(script, *words, cwd=home, timeout_s=200)
    assert re.search(mistake.said.replace("{port}", str(port)), result.stdout, re.MULTILINE), result.stdout[-3000:]
    assert "Traceback" not in result.stdout and result.returncode == mistake.code
    assert mistake.code == 0 or mistake.script == DOCTOR or len(re.findall("^error: ", result.stdout, re.MULTILINE)) == 1


def test_there_are_35() -> None:
    assert len(MISTAKES) == 35
