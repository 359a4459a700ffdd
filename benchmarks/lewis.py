"""RL of the speaker, the listener, or both in the Lewis game, with nano models and several seeds.

    .venv/bin/python benchmarks/lewis.py --out runs/lewis_seeds  # runs missing cells, prints table
    .venv/bin/python benchmarks/lewis.py --out runs/lewis_seeds --cells speaker --seeds 0
    .venv/bin/python benchmarks/lewis.py --out runs/lewis_seeds --table # prints the table only
    # Smoke test, one step per run:
    .venv/bin/python benchmarks/lewis.py --out runs/tiny --tiny --seeds 0 --cells speaker
    # Candidate images per second, and the time outside the engine:
    .venv/bin/python benchmarks/lewis.py --out runs/lewis_seeds --pace

A cell is one way to train speaker, listener or both. The seed determines the initial weights, the
demonstrations and the rollouts; all seeds use the same images and rounds. At the end of every cell,
the same games are played on held-out concepts with greedy decoding, once with each of three
listeners. The partner is the listener that computes the reward. The frozen listener is the
partner's SFT checkpoint. The stranger is a listener that was trained with another seed. In the
cells with the suffix _cost, each word of a description costs 0.02 of the speaker's reward. The
option --tiny works only for the speaker cell: after a single SFT step, a speaker's descriptions are
too poor for a listener to score.
"""

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from card_games import make, train
from lewis_pace import pace
from numberline import ROOT

from megatron_rl.evaluation.intervals import wilson_interval

CELLS = ("speaker", "listener", "alternating", "simultaneous", "speaker_cost", "simultaneous_cost")
COST = "_cost"
ROUNDS, WAIT_S = 2, 600
SIGHT = ["--min-pixels", "7056", "--max-pixels", "7100", "--max-model-len", "512", "--kv-cache-mib", "64"]
ALONE = ["services.listener={kind: '', model: '', args: []}", "services.speaker={kind: '', model: '', args: []}"]
TINY = ["task.data.max_eval=4", "batch.prompts_per_step=2", "batch.group_size=2"]
TINY_STAGE = {"sft": ["sft.batch_size=2", "sft.num_demonstrations=4", "sft.steps=[1,1]", "task.data.max_eval=4"], "rl": TINY}


@dataclass(slots=True, frozen=True)
class Home:
    """Folders and settings for the runs of one seed."""

    out: Path
    seed: int
    tiny: bool
    suffix: str = ""
    """Suffix of the names of RL runs: COST in the cells with a cost, else empty."""

    @property
    def folder(self) -> Path:
        """Folder of the seed's runs."""
        return self.out / f"seed{self.seed}"

    def of(self, seed: int) -> "Home":
        """Return a copy of these settings with another seed."""
        return replace(self, seed=seed)

    def rl_folder(self, name: str) -> Path:
        """Return the run directory of an RL run."""
        return self.folder / f"{name}{self.suffix}"

    def words(self, stage: str) -> list[str]:
        """Return the overrides that all runs of a stage (sft or rl) share."""
        data = self.out / "data" / "speaker"
        given = [f"task.data.train=[{data}:train]", f"task.data.eval=[{self.out / 'held_out' / 'speaker'}:test]"]
        return [*given, f"task.data.images={self.out / 'pictures'}", f"run.seed={self.seed}", *(TINY_STAGE[stage] if self.tiny else [])]

    def run(self, name: str, experiment: str, model: Path, *words: str) -> Path:
        """Run an experiment to its end, unless it is already finished; return its run directory."""
        stage = "sft" if "_sft_" in experiment else "rl"
        folder = self.folder / name if stage == "sft" else self.rl_folder(name)
        further = ["run.steps=1"] if self.tiny and stage == "rl" else []
        further += ["task.options.word_cost=0.02"] if self.suffix and experiment == "lewis_cpu" else []
        train(folder, f"experiment={experiment}", f"model.path={model}", *self.words(stage), *words, *further)
        load = folder / "load"
        if not load.exists():
            load.write_text(f"{os.getloadavg()[0]:.0f}\n")
        return folder


@contextlib.contextmanager
def serving(kind: str, model: Path, *words: str, token: str = "") -> Iterator[str]:
    """Run a listener or speaker server and yield its URL.

    If the server requires a token, `token` must be the server's token.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        f"megatron_rl.tasks.lewis.server.{kind}_app",
        "--model",
        str(model),
        "--port",
        str(port),
        *SIGHT,
        *words,
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        for _ in range(WAIT_S):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, headers=headers).status_code == 200:
                    break
            time.sleep(1)
        else:
            raise TimeoutError(f"{' '.join(command)}: not healthy after {WAIT_S} s")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def warm_start(home: Home) -> None:
    """Create the seed's nano model and train a listener and a speaker from it by SFT."""
    make("make_tiny_qwen2_5_vl", home.folder / "nano", "--seed", home.seed, "--words", home.out / "data" / "words.txt")
    listener = home.run("listener_sft", "lewis_listener_sft_cpu", home.folder / "nano")
    if not (home.folder / "speaker_sft" / "eval.json").exists():
        with serving("listener", listener / "final") as url:
            home.run("speaker_sft", "lewis_speaker_sft_cpu", home.folder / "nano", *ALONE[:1], f"task.listener.urls=[{url}]")


def play(home: Home, cell: str) -> None:
    """Run one cell with the seed of `home`."""
    warm_start(home)
    stranger = home.of(home.seed + 1)
    if not (stranger.folder / "listener_sft" / "final").exists():
        make("make_tiny_qwen2_5_vl", stranger.folder / "nano", "--seed", stranger.seed, "--words", home.out / "data" / "words.txt")
        stranger.run("listener_sft", "lewis_listener_sft_cpu", stranger.folder / "nano")
    speaker, listener = home.folder / "speaker_sft" / "final", home.folder / "listener_sft" / "final"
    with serving("listener", listener) as frozen, serving("listener", stranger.folder / "listener_sft" / "final") as other:
        heard = [*ALONE[:1], f"+task.options.held_out_listeners={{frozen: '{frozen}', stranger: '{other}'}}"]
        cells = {"speaker": alone, "listener": listening, "alternating": alternating, "simultaneous": simultaneous}
        suffix = COST if cell.endswith(COST) else ""
        cells[cell.removesuffix(COST)](replace(home, suffix=suffix), speaker, listener, frozen, heard)


def alone(home: Home, speaker: Path, listener: Path, frozen: str, heard: list[str]) -> None:
    """Train the speaker; the frozen listener computes the reward."""
    home.run("speaker", "lewis_cpu", speaker, *heard, f"task.listener.urls=[{frozen}]", *sheets(home, "speaker"))


def listening(home: Home, speaker: Path, listener: Path, frozen: str, heard: list[str]) -> None:
    """Train the listener on descriptions from the speaker's SFT checkpoint.

    Speaker and trained listener are then evaluated together without further training.
    """
    with serving("speaker", speaker) as url:
        trained = home.run("listener_rl", "lewis_listener_cpu", listener, *ALONE[1:], f"task.speaker.urls=[{url}]")
    with serving("listener", trained / "final") as url:
        judged(home, "listener", speaker, heard, url)


def alternating(home: Home, speaker: Path, listener: Path, frozen: str, heard: list[str]) -> None:
    """Train speaker and listener in alternating runs.

    Each run uses the latest checkpoint of the other model and starts with a new optimizer state.
    """
    for turn in range(ROUNDS):
        with serving("listener", listener) as url:
            words = [*heard, f"task.listener.urls=[{url}]", *half(home, of=50)]
            speaker = home.run(f"alternating_speaker_{turn}", "lewis_cpu", speaker, *words, *sheets(home, "alternating")) / "final"
        with serving("speaker", speaker) as url:
            words = [*ALONE[1:], f"task.speaker.urls=[{url}]", *half(home, of=26)]
            listener = home.run(f"alternating_listener_{turn}", "lewis_listener_cpu", listener, *words) / "final"
    with serving("listener", listener) as url:
        judged(home, "alternating", speaker, heard, url)


def simultaneous(home: Home, speaker: Path, listener: Path, frozen: str, heard: list[str]) -> None:
    """Train speaker and listener in two concurrent runs.

    After each step, each run sends its weights to a server that the other run queries.
    """
    if not (home.rl_folder("simultaneous_speaker") / "eval.json").exists():
        file, token = home.folder / "services.token", secrets.token_urlsafe(32)
        file.write_text(token)
        taken, asks = ("--trained", "--token-file", str(file)), f"token_file={file}"
        with serving("listener", listener, *taken, token=token) as hears, serving("speaker", speaker, *taken, token=token) as says:
            words = [
                *ALONE[1:],
                f"task.speaker.urls=[{says}]",
                f"task.speaker.{asks}",
                f"weight_publish.urls=[{hears}]",
                f"weight_publish.{asks}",
            ]
            own = [*heard, f"task.listener.urls=[{hears}]", f"task.listener.{asks}", "task.listener.partner_is_training=true"]
            own += [f"weight_publish.urls=[{says}]", f"weight_publish.{asks}"]
            with ProcessPoolExecutor(1) as beside:  # processor time is counted per process
                listens = beside.submit(home.run, "simultaneous_listener", "lewis_listener_cpu", listener, *words)
                home.run("simultaneous_speaker", "lewis_cpu", speaker, *own, *sheets(home, "simultaneous"))
                listens.result()
    with serving("listener", home.rl_folder("simultaneous_listener") / "final") as url:
        judged(home, "simultaneous", home.rl_folder("simultaneous_speaker") / "final", heard, url)


def judged(home: Home, name: str, speaker: Path, heard: list[str], url: str) -> None:
    """Evaluate the speaker with the listener at `url`, in a run with learning rate 0."""
    still = ["optim.lr=0", "run.steps=1", "batch.prompts_per_step=2", "batch.group_size=2"]
    home.run(name, "lewis_cpu", speaker, *heard, f"task.listener.urls=[{url}]", *still, *sheets(home, name))


def half(home: Home, *, of: int) -> list[str]:
    """Return the override that sets the number of steps of an alternating run to `of` / ROUNDS."""
    return [] if home.tiny else [f"run.steps={of // ROUNDS}"]


def sheets(home: Home, name: str) -> list[str]:
    """Return the overrides that set the output paths of the final games."""
    folder = home.rl_folder(f"sheets/{name}")
    return [f"task.options.sheets={folder}", f"task.options.log={folder.with_suffix('.jsonl')}"]


def table(out: Path, seeds: list[int]) -> str:
    """Return the Markdown table of all cells."""
    head = "| seed | cell | partner (95%) | frozen | stranger | drift | words | load | processor s |"
    lines = [head, "|" + "---|" * 9]
    for seed in seeds:
        for name in ("speaker_sft", *CELLS):
            folder = out / f"seed{seed}" / name
            if not (folder / "eval.json").exists():
                lines.append(f"| {seed} | {name} | not run | | | | | | |")
                continue
            value = json.loads((folder / "eval.json").read_text())
            low, high = wilson_interval(value["greedy_success"], int(value["greedy_episodes"]))
            figures = [f"{value[f'greedy_{key}']:.1%}" if f"greedy_{key}" in value else "-" for key in ("frozen", "stranger", "drift")]
            load, spent = (folder / "load").read_text().strip(), float(folder.with_name(f"{name}.seconds").read_text())
            found = f"{value['greedy_success']:.1%} ({low:.1%} to {high:.1%}) | {' | '.join(figures)} | {value['greedy_words']:.1f}"
            lines.append(f"| {seed} | {name} | {found} | {load} | {spent:.0f} |")
    return "\n".join(lines)


def prepare(out: Path, *, tiny: bool) -> None:
    """Create the images, the training rounds, and one round per held-out concept.

    Both sets of rounds split the concepts with the same seed.
    """
    make("make_emoji", out / "pictures", *(["--num", "4", "--views", "3"] if tiny else []))
    rounds = ["--pictures", out / "pictures", "--distractors", "random"]
    make("make_lewis", out / "data", *rounds, "--queries", "6")
    make("make_lewis", out / "held_out", *rounds, "--queries", "1")


def main() -> None:
    """Run the cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lewis_seeds"))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--tiny", action="store_true", help="smoke test: one step per run")
    parser.add_argument("--pace", action="store_true", help="only measure the throughput of the first seed's listener")
    arguments = parser.parse_args()
    if arguments.tiny and arguments.cells != ["speaker"]:
        parser.error("--tiny requires --cells speaker: after one step, the speaker writes no description that a listener could score")
    out = arguments.out.resolve()
    if arguments.pace:
        with serving("listener", out / f"seed{arguments.seeds[0]}" / "listener_sft" / "final") as url:
            print(pace(url, out / "pictures"))
        return
    if not arguments.table:
        prepare(out, tiny=arguments.tiny)
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            play(Home(out, seed, arguments.tiny), cell)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(table(out, arguments.seeds))


if __name__ == "__main__":
    main()
