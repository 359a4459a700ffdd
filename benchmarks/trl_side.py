"""TRL's side of benchmarks/vs_trl.py; trains with GRPOTrainer on single-turn NumberLine.

This script runs in .venv-trl (requirements-trl.txt). It uses this project's functions for all parts
that must be equal on both sides: choosing prompts, resizing images and computing rewards. Before
training, it checks that TRL's prompt ids and pixel values equal those of this project's renderer.
"""

import argparse
import asyncio
import json
import os
import time
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset
from PIL.Image import Image as Picture
from transformers import AutoProcessor, PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from megatron_rl.config import ModelSettings, TaskSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import choose_prompts
from megatron_rl.tasks.gym_cards.number_line import NumberLineState, draw_state
from megatron_rl.tasks.gym_cards.task import PROMPT, NumberLineEnv, NumberLineTask, make_observation
from megatron_rl.types import Example

VLLM_CONTEXT = 512
"""Maximum sequence length in tokens; prompts have about 110 tokens."""


class StepLog(TrainerCallback):
    """Callback that writes one JSON line per step.

    A line contains the seconds since the end of the previous step, the mean reward, the fraction of
    solved samples, and TRL's metrics.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._mark = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Start the timer of the first step."""
        self._mark = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **_: object) -> None:
        """Write the JSON line of a step."""
        if not state.is_world_process_zero or "reward" not in logs:
            return
        now = time.perf_counter()
        line = {
            "step": state.global_step - 1,
            "time/total": now - self._mark,
            "reward/mean": logs["reward"],
            "solved": logs["solved"],
            "rollout/tokens": logs["completions/mean_length"],
            "grad_norm": logs["grad_norm"],
        }
        with self._out.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
        self._mark = now


async def judged(replies: list[str], states: list[NumberLineState]) -> list[float]:
    """Return the environment's reward for one move from each state.

    The reward is 1 if the move reaches the goal, 0 if it gets closer to the goal, and -1 if it is
    wrong or invalid.
    """
    values = []
    for reply, state in zip(replies, states, strict=True):
        env = NumberLineEnv(state)
        await env.reset(0)
        values.append((await env.step(reply)).reward)
    return values


def rewards(prompts: list, completions: list, current: list[int], target: list[int], log_metric: object, **_: object) -> list[float]:
    """Return the rewards and log the fraction of solved samples (reward function for TRL).

    A sample is solved if its reward is at least 0.
    """
    replies = [completion[0]["content"] for completion in completions]
    values = asyncio.run(judged(replies, list(zip(current, target, strict=True))))
    log_metric("solved", sum(value >= 0 for value in values) / len(values))
    return values


def prompts_as_dealt(examples: list[Example], renderer: Renderer, *, steps: int, prompts: int, seed: int) -> Dataset:
    """Return all prompts of the run in the order in which this project's scheduler chooses them.

    Prompts with the same state share one image in memory.
    """
    dealt = [example for step in range(steps) for example in choose_prompts(examples, prompts, seed=seed, batch_index=step)]

    @cache
    def resized(state: NumberLineState) -> Picture:
        return renderer.image(draw_state(state)).pil

    def show(rows: dict[str, list[int]]) -> dict[str, list]:
        pictures = [resized(state) for state in zip(rows["current"], rows["target"], strict=True)]
        return {**rows, "prompt": [[{"role": "user", "content": PROMPT}] for _ in pictures], "image": pictures}

    rows = {key: [example.payload[key] for example in dealt] for key in ("current", "target")}
    return Dataset.from_dict(rows).with_transform(show)


def check_prompt(trainer: GRPOTrainer, renderer: Renderer) -> None:
    """Assert that TRL computes the same prompt ids and pixels as this project's renderer."""
    row = trainer.train_dataset[0]
    ours = renderer.prompt([make_observation((row["current"], row["target"]))])
    message = {"role": "user", "content": [{"type": "image", "image": row["image"]}, {"type": "text", "text": PROMPT}]}
    (token_ids,), _, fields = trainer._tokenize_prompts([[message]])
    assert list(token_ids) == ours.token_ids, "prompt ids of TRL and of our renderer differ"
    assert torch.equal(fields["pixel_values"], ours.images[0].patch_PC), "pixels of TRL and of our renderer differ"


def grpo_config(given: argparse.Namespace) -> GRPOConfig:
    """Return TRL's config with the settings of the comparison and TRL's fastest options on a CPU.

    TRL is fastest on a CPU with float32, without activation recomputation and without a reference
    model.
    """
    samples = given.prompts * given.group_size // int(os.environ.get("WORLD_SIZE", 1))
    return GRPOConfig(
        output_dir=str(given.out.parent / "trl_output"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=given.micro_batch,
        gradient_accumulation_steps=samples // given.micro_batch,
        max_steps=given.steps,
        num_generations=given.group_size,
        max_completion_length=given.max_tokens,
        shuffle_dataset=False,
        temperature=1.0,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        cache_implementation="static" if given.static_cache else None,
        generation_kwargs=None if given.vllm else {"use_cache": True},
        ddp_find_unused_parameters=False,
        torch_compile=given.compile,
        use_vllm=given.vllm,
        vllm_mode="colocate",
        vllm_max_model_length=VLLM_CONTEXT,
        model_init_kwargs={"dtype": "float32"},
        seed=given.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train with TRL."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for JSON lines, one per step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="prompts per step, over all processes")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--min-pixels", type=int, required=True)
    parser.add_argument("--max-pixels", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="torch threads per process")
    parser.add_argument("--micro-batch", type=int, required=True, help="samples per forward and backward pass")
    parser.add_argument("--static-cache", action="store_true", help="use transformers' static key/value cache instead of the dynamic one")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the same process")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    renderer = Renderer(ModelSettings(path=given.model, min_pixels=given.min_pixels, max_pixels=given.max_pixels))
    examples = NumberLineTask(TaskSettings(name="number_line", max_turns=1)).examples("train")
    processor = AutoProcessor.from_pretrained(given.model)
    processor.image_processor.do_resize = False  # the images have their final size
    trainer = GRPOTrainer(
        given.model,
        reward_funcs=rewards,
        args=grpo_config(given),
        train_dataset=prompts_as_dealt(examples, renderer, steps=given.steps, prompts=given.prompts, seed=given.seed),
        processing_class=processor,
        callbacks=[StepLog(given.out)],
    )
    trainer.remove_callback(PrinterCallback)
    check_prompt(trainer, renderer)
    trainer.train()


if __name__ == "__main__":
    main()
