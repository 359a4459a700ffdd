"""Checks of prompts before the first step.

The first prompt is logged, and prompts that do not fit into a sequence are reported.
"""

from collections.abc import Callable, Mapping, Sequence
from textwrap import indent

from megatron_rl.config import Settings
from megatron_rl.data.prompt_lengths import PromptLengthChecker, measure_prompt_overhead
from megatron_rl.data.questions import QuestionDataset
from megatron_rl.data.survey import survey_questions
from megatron_rl.distributed.world import run_on_rank_zero
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Example, TokenSequence

SHOWN_CHARACTERS = 500
"""Number of characters to log from the start and from the end of the first prompt."""
MAX_SHOWN_MISMATCHES = 5
"""Maximum number of warnings about long prompts per split; the doctor lists more."""


def report_prompts(settings: Settings, *, rollout_manager: RolloutManager, log: Callable[[str], None]) -> None:
    """Log the first prompt, and warnings about columns, special tokens and long prompts.

    Collective over all ranks; the main rank performs the checks.

    Raises:
        ValueError: The fraction of questions that do not fit exceeds run.max_failed_fraction. The
            error is raised on all ranks.
    """
    prompt = rollout_manager.render_first_prompt()
    run_on_rank_zero(lambda: None if prompt is None else _report_first_prompt(settings, prompt, rollout_manager=rollout_manager, log=log))


def _report_first_prompt(settings: Settings, prompt: TokenSequence, *, rollout_manager: RolloutManager, log: Callable[[str], None]) -> None:
    words = rollout_manager.renderer.describe_sequence(prompt)
    short = words if len(words) <= 2 * SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]} ... {words[-SHOWN_CHARACTERS:]}"
    log(f"first prompt, {len(prompt.token_ids)} tokens:\n{indent(short.rstrip(), '    ')}")
    questions = {split: rollout_manager.task.examples(split) for split in ("train", "eval")}
    report_column_warnings(questions, log=log)
    datasets = {split: of_split for split, of_split in questions.items() if isinstance(of_split, QuestionDataset)}
    if datasets.keys() == questions.keys():
        report_blanked_tokens(datasets, rollout_manager=rollout_manager, log=log)
        report_long_prompts(settings, datasets, prompt, rollout_manager=rollout_manager, log=log)


def report_blanked_tokens(questions: dict[str, QuestionDataset], *, rollout_manager: RolloutManager, log: Callable[[str], None]) -> None:
    """Warn about questions that contain special tokens, which the policy reads as plain text."""
    for split, of_split in questions.items():
        names = [name for example in of_split if (name := rollout_manager.renderer.find_special_token(str(example.payload["question"])))]
        if names:
            remedy = "task.data.allow_grounding_tokens=true keeps grounding tokens"
            rest = names[0][1:]
            log(f"warning: task.data.{split}: {len(names)} questions contain special tokens, shown to the policy as '< {rest}'; {remedy}")


def report_column_warnings(examples: Mapping[str, Sequence[Example]], *, log: Callable[[str], None]) -> None:
    """Warn about unused columns, for each split that is read from files."""
    for split, of_split in examples.items():
        for line in of_split.warnings if isinstance(of_split, QuestionDataset) else ():
            log(f"warning: task.data.{split}: {line}")


def report_long_prompts(
    settings: Settings,
    questions: dict[str, QuestionDataset],
    prompt: TokenSequence,
    *,
    rollout_manager: RolloutManager,
    log: Callable[[str], None],
) -> None:
    """Warn about images above model.max_pixels, and questions that do not fit into a sequence.

    The text around each question is assumed to be as long as in the first prompt.
    """
    beside = measure_prompt_overhead(questions["train"][0], prompt, settings, rollout_manager.renderer)
    for split, of_split in questions.items():
        prompts = PromptLengthChecker(settings, rollout_manager.renderer, overhead_tokens=beside)
        found = survey_questions(of_split, check_question=prompts.check_question)
        for line in (*prompts.pixel_warnings(), *found.warnings[:MAX_SHOWN_MISMATCHES]):
            log(f"warning: task.data.{split}: {line}")
        num_more = len(found.warnings[MAX_SHOWN_MISMATCHES:]) + found.num_more_warnings
        if num_more:
            log(f"warning: task.data.{split}: {num_more} more warnings; launch/doctor.py lists them")
        prompts.check_enough_fit(split, num=len(of_split), example_error="".join(found.warnings[:1]))
