"""Supervised fine-tuning of a model with experts, with and without losses of its routers. Run by
test_router_loss_run.py.

    python router_loss_run.py MODEL_FOLDER RUN_FOLDER AUX_COEF Z_COEF
"""

import sys
from pathlib import Path

from megatron_rl.config import (
    AlgoSettings,
    DataSettings,
    EngineSettings,
    ModelSettings,
    OptimSettings,
    RunSettings,
    Settings,
    SftSettings,
    TaskSettings,
)
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins
from tests.support.data_files import write_rows
from tests.support.judged_ppo_run import make_questions, make_transcript

if __name__ == "__main__":
    model, folder, aux, z = sys.argv[1:]
    asked = write_rows(Path(folder).parent / "questions.jsonl", make_questions())
    shown = write_rows(Path(folder).parent / "shown.jsonl", list(map(make_transcript, make_questions())))
    data = DataSettings(train=[str(asked)], eval=[str(asked)], demonstrations=[str(shown)], max_eval=4)
    run(
        Settings(
            stage="sft",
            model=ModelSettings(path=model, min_pixels=3136, max_pixels=3200),
            engine=EngineSettings(kv_cache_mib=16, max_model_len=128),
            optim=OptimSettings(lr=2e-4),
            algo=AlgoSettings(router_aux_loss_coef=float(aux), router_z_loss_coef=float(z)),
            sft=SftSettings(splits=["transcripts"], steps=[4], batch_size=6, num_demonstrations=24),
            task=TaskSettings(name="vqa", data=data, prompt="{question}", max_turns=1, max_new_tokens=16),
            run=RunSettings(dir=folder),
        ),
        Plugins(),
    )
