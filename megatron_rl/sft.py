"""The supervised warm start: the task's demonstrations through the same Policy, packing and optimizer as GRPO.

Loss on assistant tokens only (the sequence's mask); the mean is over tokens.
"""

from itertools import cycle, islice

from megatron_rl.algo.losses import LossMetrics, sft_loss
from megatron_rl.batch import Piece
from megatron_rl.checkpoints import Checkpoints
from megatron_rl.config import Settings
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.episode import seed_of
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run import Run
from megatron_rl.tasks.base import Task
from megatron_rl.types import Batch


def warm_start(settings: Settings, *, task: Task, policy: Policy, renderer: Renderer, run: Run, checkpoints: Checkpoints) -> None:
    """Train stage after stage on each stage's demonstrations, in the order the task gives them, round and round."""
    with run.spans("sync"):
        checkpoints.restore()
    sft, seed, begin = settings.sft, settings.run.seed, 0
    for stage, (split, steps) in enumerate(zip(sft.splits, sft.steps, strict=True)):
        done, begin = max(0, run.first_step - begin), begin + steps
        if done >= steps:
            continue
        with run.spans("render"):
            demonstrations = task.demonstrations(split, num=sft.num_demonstrations, seed=seed_of(seed, stage))
            pieces = [piece_of(renderer, demonstration.messages) for demonstration in demonstrations]
        endless = islice(cycle(pieces), done * sft.batch_size, None)
        for step in range(begin - steps + done, begin):
            with run.spans("update"):
                metrics = policy.update(policy.pack(list(islice(endless, sft.batch_size)), max_tokens=sft.micro_batch_tokens), objective)
            with run.spans("checkpoint"):
                checkpoints.begin(step + 1)
            with run.spans("record"):
                run.record(step, [], metrics)
            if step + 1 < sum(sft.steps):  # the last one is judged by the final evaluation
                with run.spans("checkpoint"):
                    checkpoints.step_done(step + 1, history=run.history, metrics=metrics)


def piece_of(renderer: Renderer, messages: list) -> Piece:
    sequence = renderer.transcript(messages)
    return Piece.uniform(sequence, denominator=sum(sequence.loss_mask))


def objective(logprob_R, entropy_R, batch: Batch, rows_R):  # noqa: ANN001, ANN201 (policy.Loss)
    """Negative log-likelihood of the demonstrated tokens."""
    return sft_loss(logprob_R, batch.weight_T[rows_R]), LossMetrics(sums={"policy/entropy": entropy_R.detach().sum()}, maxima={})
