"""Supervised fine-tuning on a task's demonstrations.

Policy, packing and optimizer are the same as in RL. The loss is the mean over all tokens of
assistant messages, except messages whose field "loss" is False. A teacher adds the divergence of
the policy from it at these tokens.
"""

from collections.abc import Callable, Sequence

from megatron_rl.algo.distill import make_distill_term
from megatron_rl.algo.objective import make_sft_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import Settings
from megatron_rl.data.transcript_survey import make_length_check
from megatron_rl.data.transcripts import TRANSCRIPTS_SPLIT, load_demonstrations
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.episode import derive_seed
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Task
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.record import Run
from megatron_rl.run.shutdown import StopSignal
from megatron_rl.types import Demonstration, MicroBatch, TokenSequence

MAX_COMPARED = 32
"""Maximum number of transcripts to compare with the prompts of the task."""
CACHE_BYTES = 1 << 30
"""Maximum size in bytes of the images in one process's demonstration cache. The size of an image is
the number of bytes of its resized RGB pixels.
"""


def train_sft(
    settings: Settings, *, task: Task, policy: Policy, renderer: Renderer, run: Run, checkpoints: Checkpoints, stop_signal: StopSignal,
    teacher_alone: bool = False,
) -> None:  # fmt: skip
    """Run the SFT stages in order. Each stage repeats its demonstrations until its last step.

    With `teacher_alone`, the loss is the divergence from the teacher, without the log-likelihood of
    the demonstrations.

    Raises:
        GracefulStop: A stop of the run was requested; raised on every rank.
    """
    with run.step_timer("sync"):
        checkpoints.restore()
    stop_signal.check()
    sft, seed, begin = settings.sft, settings.run.seed, 0
    splits = sft.splits or [task.default_demonstration_split()]
    for stage, (split, steps) in enumerate(zip(splits, sft.steps, strict=True)):
        done, begin = max(0, run.first_step - begin), begin + steps
        if done >= steps:
            continue
        with run.step_timer("render"):
            drawn = {"num": sft.num_demonstrations, "seed": derive_seed(seed, stage)}
            if split == TRANSCRIPTS_SPLIT:
                demonstrations = load_demonstrations(task.settings.data, split, **drawn)
                demonstrations.check_lengths(make_length_check(settings, renderer))
                for line in (*demonstrations.warnings, *prompt_warnings(task, demonstrations)) if split not in splits[:stage] else ():
                    run.log(f"warning: task.data.demonstrations: {line}")
            else:
                demonstrations = task.demonstrations(split, **drawn)
            shown = RenderedDemonstrations(renderer, demonstrations)
        for step in range(begin - steps + done, begin):
            with run.step_timer("render"):
                first = (step - begin + steps) * sft.batch_size
                minibatch = [shown[number] for number in range(first, first + sft.batch_size)]
            with run.step_timer("update"):
                batches = policy.pack(minibatch, max_tokens=settings.batch.micro_batch_tokens)
                with run.dump_batches_on_error(batches, step=step, load_image_patches=policy.load_image_patches):
                    metrics = update(settings, policy, batches, teacher_alone=teacher_alone, step=step)
            with run.step_timer("checkpoint"):
                checkpoints.begin_step(step + 1, is_last=step + 1 == sum(sft.steps))
            with run.step_timer("record"):
                run.record(step, metrics)
            if step + 1 < sum(sft.steps):  # the last checkpoint is finished after the final evaluation
                with run.step_timer("checkpoint"):
                    checkpoints.finish_step(step + 1, history=run.history, metrics=metrics)
            stop_signal.check()
            if run.stops_early:
                return


def update(settings: Settings, policy: Policy, batches: list[MicroBatch], *, teacher_alone: bool, step: int) -> dict[str, float]:
    """Run one optimizer update, with the term of a teacher if there is one."""
    if settings.distill.teacher:
        policy.logprobs(batches, weights="teacher")  # sets the teacher's hidden states
    loss = make_sft_objective(distill=make_distill_term(settings.distill, step=step), teacher_alone=teacher_alone)
    return policy.update(batches, loss, step=step)


def load_step_demonstrations(
    settings: Settings, *, task: Task, renderer: Renderer, log: Callable[[str], None]
) -> Callable[[int], list[TokenSequence]] | None:
    """Return a function step -> demonstrations among the rollouts of the step; None without any.

    Step k has the demonstrations k * num to (k + 1) * num - 1 of shuffled passes over the files, so
    that a resumed run continues at the same one.

    Raises:
        ValueError: A conversation cannot be used, or is too long.
    """
    num = settings.distill.count_demonstrations(settings.batch.prompts_per_step * settings.batch.group_size)
    if num == 0:
        return None
    drawn = {"num": num * settings.run.steps, "seed": derive_seed(settings.run.seed, 0)}
    demonstrations = load_demonstrations(task.settings.data, TRANSCRIPTS_SPLIT, **drawn)
    demonstrations.check_lengths(make_length_check(settings, renderer))
    for line in (*demonstrations.warnings, *prompt_warnings(task, demonstrations)):
        log(f"warning: task.data.demonstrations: {line}")
    shown = RenderedDemonstrations(renderer, demonstrations)
    return lambda step: [shown[number].sequence for number in range(step * num, (step + 1) * num)]


def prompt_warnings(task: Task, demonstrations: Sequence[Demonstration]) -> list[str]:
    """Return a warning if the first transcripts have other prompts than the task's episodes."""
    given = [demonstrations[number] for number in range(min(len(demonstrations), MAX_COMPARED))]
    found = [(each.where, mismatch) for each in given if (mismatch := task.find_prompt_mismatch(each.messages))]
    if not found:
        return []
    where, mismatch = found[0]
    return [
        f"{len(found)} of the first {len(given)} transcripts have other prompts than task {task.name} gives the policy; {where}: {mismatch}"
    ]


class RenderedDemonstrations:
    """Endlessly repeated demonstrations of a stage, rendered to token sequences on access.

    Rendered items are cached, without their image patches, up to CACHE_BYTES of images. Items
    beyond that limit are rendered again on each access.
    """

    def __init__(self, renderer: Renderer, demonstrations: Sequence[Demonstration]) -> None:
        self._renderer, self._demonstrations = renderer, demonstrations
        self._cached: dict[int, PackItem] = {}
        self._num_bytes = 0

    def __getitem__(self, number: int) -> PackItem:
        number %= len(self._demonstrations)
        return self._cached.get(number) or self._render(number)

    def _render(self, number: int) -> PackItem:
        demonstration = self._demonstrations[number]
        where = demonstration.where or f"demonstration {number}"
        try:
            context = self._renderer.transcript(demonstration.messages)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not any(context.loss_mask):
            raise ValueError(f"{where}: contains no assistant message with a loss; remove this demonstration")
        context.images = [image.without_patches() for image in context.images]
        weighted = PackItem(context, denominator=sum(context.loss_mask))
        self._num_bytes += sum(3 * image.num_pixels for image in context.images)
        if self._num_bytes <= CACHE_BYTES:
            self._cached[number] = weighted
        return weighted
