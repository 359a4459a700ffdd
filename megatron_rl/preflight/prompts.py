"""What a run says of its prompts before the first step: the first one as the policy reads it, and those that have no room."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import indent

from megatron_rl.config import Settings
from megatron_rl.data.prompt_lengths import Prompts, around
from megatron_rl.data.questions import Questions
from megatron_rl.data.survey import survey
from megatron_rl.distributed.world import run_on_rank_zero
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Example, TokenSequence

SHOWN_CHARACTERS = 500
"""Of the first prompt, from its begin and from its end."""
MAX_SHOWN_MISMATCHES = 5
"""Lines for each split; the doctor has more of them."""


def report_prompts(settings: Settings, *, fleet: RolloutManager, tell: Callable[[str], None]) -> None:
    """On every rank; the main one does the looking. ValueError, on all: more questions cannot be played than run.max_failed_fraction
    allows."""
    prompt = fleet.render_first_prompt()
    run_on_rank_zero(lambda: None if prompt is None else _report_first_prompt(settings, prompt, fleet=fleet, tell=tell))


def _report_first_prompt(settings: Settings, prompt: TokenSequence, *, fleet: RolloutManager, tell: Callable[[str], None]) -> None:
    words = fleet.renderer.shown(prompt)
    short = words if len(words) <= 2 * SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]} ... {words[-SHOWN_CHARACTERS:]}"
    tell(f"first prompt, {len(prompt.token_ids)} tokens:\n{indent(short.rstrip(), '    ')}")
    questions = {split: fleet.task.examples(split) for split in ("train", "eval")}
    report_column_warnings(questions, tell=tell)
    if all(isinstance(of_split, Questions) for of_split in questions.values()):
        report_blanked_tokens(questions, fleet=fleet, tell=tell)
        report_long_prompts(settings, questions, prompt, fleet=fleet, tell=tell)


def report_blanked_tokens(questions: dict[str, Questions], *, fleet: RolloutManager, tell: Callable[[str], None]) -> None:
    """Warn of questions with names of special tokens, which the policy reads as text."""
    for split, of_split in questions.items():
        names = [name for example in of_split if (name := fleet.renderer.find_blanked(str(example.payload["question"])))]
        if names:
            remedy = "task.data.allow_grounding_tokens=true keeps those of grounding"
            rest = names[0][1:]
            tell(f"warning: task.data.{split}: {len(names)} questions name special tokens, written with a blank, as '< {rest}'; {remedy}")


def report_column_warnings(examples: Mapping[str, Sequence[Example]], *, tell: Callable[[str], None]) -> None:
    """Name the columns that are not read, of each split that is read from files."""
    for split, of_split in examples.items():
        for line in of_split.warnings if isinstance(of_split, Questions) else ():
            tell(f"warning: task.data.{split}: {line}")


def report_long_prompts(
    settings: Settings, questions: dict[str, Questions], prompt: TokenSequence, *, fleet: RolloutManager, tell: Callable[[str], None]
) -> None:
    """Name by file and row what cannot be played. What stands around a question is taken to be as long as in the first prompt."""
    beside = around(questions["train"][0], prompt, settings, fleet.renderer)
    for split, of_split in questions.items():
        prompts = Prompts(settings, fleet.renderer, around=beside)
        found = survey(of_split, look=prompts.look)
        for line in found.warnings[:MAX_SHOWN_MISMATCHES]:
            tell(f"warning: task.data.{split}: {line}")
        num_more = len(found.warnings[MAX_SHOWN_MISMATCHES:]) + found.num_more_warnings
        if num_more:
            tell(f"warning: task.data.{split}: and {num_more} more; launch/doctor.py lists them")
        prompts.require_played(split, num=len(of_split), told="".join(found.warnings[:1]))
