"""Generates a demo run for the page: questions about colored squares and a policy that zooms in.

No policy is trained; the rewards are random numbers whose mean rises from step to step.
"""

import hashlib
import random
from pathlib import Path

from PIL import Image as pil
from PIL import ImageDraw

from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.metrics import METRICS_FILE
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER, save_images
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.observe.step_metrics import reward_of
from megatron_rl.types import Image, JudgeResult, Rollout, StopReason, TokenSequence, ToolCall, Turn

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 12, 4, 4
COLORS = ("red", "green", "blue", "orange", "purple")
IMAGE_SIDE, SQUARE_SIDE = 280, 56


def make_demo_run(run: Path) -> None:
    """Write the rollouts and metrics of NUM_STEPS steps."""
    lines = []
    for step in range(NUM_STEPS):
        dice = random.Random(step)
        rollouts = [_make_rollout(dice, step, group, sample) for group in range(NUM_GROUPS) for sample in range(GROUP_SIZE)]
        for rollout in rollouts:
            mean = sum(reward_of(each) for each in rollouts if each.group == rollout.group) / GROUP_SIZE
            context = rollout.sequences[0]
            context.set_column("old_logprobs", [logprob + dice.gauss(0, 1e-5) * mask for logprob, mask in _logprobs_and_mask(context)])
            context.set_column("entropies", [-0.7 * logprob for logprob in context.rollout_logprobs])
            context.set_column("advantages", [(reward_of(rollout) - mean) * mask for mask in context.loss_mask])
        save_images(run / ROLLOUTS_FOLDER, rollouts)
        write_step(step_path(run / ROLLOUTS_FOLDER, step), rollouts, step=step, num_gen_batches=1)
        reward = sum(map(reward_of, rollouts)) / len(rollouts)
        lines.append(
            {"step": step, "reward/mean": reward, "loss": dice.uniform(0.1, 0.3), "policy/entropy": 1.5 - step / 20, "time/total": 9.0}
        )
    write_lines_atomically(run / METRICS_FILE, lines)


def _logprobs_and_mask(context: TokenSequence) -> list[tuple[float, int]]:
    return list(zip(context.rollout_logprobs, context.loss_mask, strict=True))


def _make_rollout(dice: random.Random, step: int, group: int, sample: int) -> Rollout:
    place = random.Random(step * NUM_GROUPS + group)  # all rollouts of a group have the same image
    left, top, color = place.randrange(0, IMAGE_SIDE - SQUARE_SIDE), place.randrange(0, IMAGE_SIDE - SQUARE_SIDE), place.choice(COLORS)
    canvas = pil.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white")
    ImageDraw.Draw(canvas).rectangle((left, top, left + SQUARE_SIDE, top + SQUARE_SIDE), fill=color)
    is_right = dice.random() < 0.2 + 0.7 * step / NUM_STEPS
    said = color if is_right else dice.choice([each for each in COLORS if each != color])
    shift = 0 if is_right else IMAGE_SIDE // 4
    box = [max(0, left - shift), max(0, top - shift), max(0, left - shift) + SQUARE_SIDE, max(0, top - shift) + SQUARE_SIDE]
    shown, crop = _make_image(canvas), _make_image(canvas.crop((box[0], box[1], box[2], box[3])))
    context = TokenSequence()
    context.extend([1] * 8 + [2] * shown.num_tokens + [3] * 12, images=(shown,))
    spans = []
    for part, images in ((18, (crop,)), (9, ())):
        first = len(context.token_ids)
        context.extend(
            [dice.randrange(10, 99) for _ in range(part)], logprobs=[-dice.expovariate(3) for _ in range(part)], versions=[step] * part
        )
        spans.append((first, len(context.token_ids)))
        context.extend([2] * sum(image.num_tokens for image in images) + [3], images=images)
    call = ToolCall(
        tool="image_zoom_in_tool", source=f'{{"bbox_2d": {box}, "label": "square"}}', text="the part that was asked for", frame=canvas.size
    )
    said_first = "The square is small: I look closer."
    turns = [
        Turn(sequence=0, token_span=spans[0], text=said_first, tool_call=call, images=[crop], generation_s=1.5, env_s=0.02),
        Turn(sequence=0, token_span=spans[1], text=f"<answer>{said}</answer>", reward_delta=float(is_right), generation_s=0.8),
    ]
    return Rollout(
        task="made-up squares", example_id=f"square {step * NUM_GROUPS + group}", group=group, sample_index=sample, sequences=[context],
        turns=turns, question="<image>\nWhat color is the square?", answer=color,
        reward=float(is_right), outcome_reward=float(is_right), reward_terms={"accuracy": float(is_right)}, stop_reason=StopReason.DONE,
        reason="answered", verdicts=[JudgeResult(judge="made-up judge", prompt="step_evidence 1", value=float(is_right), turn=0)],
        wall_s=dice.uniform(1, 3), env_s=dice.uniform(0, 0.5),
    )  # fmt: skip


def _make_image(picture: pil.Image) -> Image:
    key = hashlib.sha256(picture.tobytes()).hexdigest()[:32]
    return Image(pil=picture, patch_PC=None, grid=(1, picture.height // 14, picture.width // 14), key=key, merge=2)
