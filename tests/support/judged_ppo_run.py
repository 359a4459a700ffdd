"""An SFT warm start that learns to write \\boxed{...}, and two PPO steps from it on questions whose
answers only a judge can grade.

    python judged_ppo_run.py MODEL_FOLDER FOLDER URL

Run by tests/e2e/test_judge_server.py, which starts the judge server.
"""

import sys
from dataclasses import replace
from pathlib import Path

from megatron_rl.config import (
    AlgoSettings,
    BatchSettings,
    CheckpointSettings,
    CriticSettings,
    DataSettings,
    EngineSettings,
    JudgeSettings,
    ModelSettings,
    OptimSettings,
    RolloutStoreSettings,
    RunSettings,
    Settings,
    SftSettings,
    TaskSettings,
)
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins
from tests.support.data_files import make_png, write_rows

COLORS = ("red", "blue", "lime", "white")
THINGS = ("wall", "door", "roof", "gate", "lamp", "boat")


def make_questions() -> list[dict]:
    """Return questions with answers that no rule can grade."""
    return [
        {
            "question": f"<image>\nWhat about the {thing}?",
            "answer": f"a hue like {color}",
            "images": [{"bytes": make_png(color, size=(56, 56))}],
        }
        for color in COLORS
        for thing in THINGS
    ]


def make_transcript(question: dict) -> dict:
    asked = {"role": "user", "content": question["question"]}
    color = question["answer"].split()[-1]
    return {"messages": [asked, {"role": "assistant", "content": f"\\boxed{{{color}}}"}], "images": question["images"]}


def sft_settings(model: Path, folder: Path) -> Settings:
    asked = write_rows(folder / "questions.jsonl", make_questions())
    shown = write_rows(folder / "shown.jsonl", list(map(make_transcript, make_questions())))
    data = DataSettings(train=[str(asked)], eval=[str(asked)], demonstrations=[str(shown)], max_eval=4)
    return Settings(
        stage="sft", model=ModelSettings(path=str(model), min_pixels=3136, max_pixels=3200),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=128), optim=OptimSettings(lr=2e-3, warmup_steps=5, beta2=0.95),
        sft=SftSettings(splits=["transcripts"], steps=[40], batch_size=12, num_demonstrations=24),
        task=TaskSettings(name="vqa", data=data, prompt="{question}", max_turns=1, max_new_tokens=16),
        run=RunSettings(dir=str(folder / "sft")),
    )  # fmt: skip


def ppo_settings(sft: Settings, folder: Path, url: str) -> Settings:
    """Return the settings of the PPO run.

    The judge samples at a high temperature, so its verdicts are close to random and a reward from
    any other source would be noticed.
    """
    judge = JudgeSettings(urls=[url], model="judge", max_tokens=64, timeout_s=120, temperature=2.0, cache=str(folder / "verdicts.sqlite"))
    return replace(
        sft, stage="rl", model=replace(sft.model, path=str(folder / "sft" / "final")), optim=OptimSettings(lr=3e-4),
        algo=AlgoSettings(name="ppo", lam=0.95, kl_coef=0.05, kl_target=0.01, kl_horizon=100),
        critic=CriticSettings(backbone="own", lr=1e-3), batch=BatchSettings(prompts_per_step=12, group_size=2, minibatches=2),
        task=replace(sft.task, judge=judge), run=RunSettings(dir=str(folder / "ppo"), steps=2),
        rollouts=RolloutStoreSettings(keep_best=24, keep_worst=0),
        checkpoint=CheckpointSettings(every=2),
    )  # fmt: skip


if __name__ == "__main__":
    home = Path(sys.argv[2])
    first = sft_settings(Path(sys.argv[1]), home)
    run(first, Plugins())
    run(ppo_settings(first, home, sys.argv[3]), Plugins())
