"""What a run says of its prompts before the first step: the first one as the policy reads it, and those that have no room."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import indent

from megatron_rl.config import Settings
from megatron_rl.data.prompt_lengths import Prompts, around
from megatron_rl.data.questions import Questions
from megatron_rl.data.survey import survey
from megatron_rl.distributed.world import on_main_rank
from megatron_rl.rollout.manager import Fleet
from megatron_rl.types import Context, Example

SHOWN_CHARACTERS = 500
"""Of the first prompt, from its begin and from its end."""
SHOWN_MISFITS = 5
"""Lines for each split; the doctor has more of them."""


def tell_prompts(settings: Settings, *, fleet: Fleet, tell: Callable[[str], None]) -> None:
    """On every rank; the main one does the looking. ValueError, on all: more questions cannot be played than run.max_failed allows."""
    prompt = fleet.first_prompt()
    on_main_rank(lambda: None if prompt is None else _look(settings, prompt, fleet=fleet, tell=tell))


def _look(settings: Settings, prompt: Context, *, fleet: Fleet, tell: Callable[[str], None]) -> None:
    words = fleet.renderer.shown(prompt)
    short = words if len(words) <= 2 * SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]} ... {words[-SHOWN_CHARACTERS:]}"
    tell(f"first prompt, {len(prompt.token_ids)} tokens:\n{indent(short.rstrip(), '    ')}")
    questions = {split: fleet.task.examples(split) for split in ("train", "eval")}
    tell_column_warnings(questions, tell=tell)
    if all(isinstance(of_split, Questions) for of_split in questions.values()):
        tell_blanked(questions, fleet=fleet, tell=tell)
        tell_misfits(settings, questions, prompt, fleet=fleet, tell=tell)


def tell_blanked(questions: dict[str, Questions], *, fleet: Fleet, tell: Callable[[str], None]) -> None:
    """Warn of questions with names of special tokens, which the policy reads as text."""
    for split, of_split in questions.items():
        names = [name for example in of_split if (name := fleet.renderer.find_blanked(str(example.payload["question"])))]
        if names:
            remedy = "task.data.allow_grounding_tokens=true keeps those of grounding"
            rest = names[0][1:]
            tell(f"warning: task.data.{split}: {len(names)} questions name special tokens, written with a blank, as '< {rest}'; {remedy}")


def tell_column_warnings(examples: Mapping[str, Sequence[Example]], *, tell: Callable[[str], None]) -> None:
    """Name the columns that are not read, of each split that is read from files."""
    for split, of_split in examples.items():
        for line in of_split.warnings if isinstance(of_split, Questions) else ():
            tell(f"warning: task.data.{split}: {line}")


def tell_misfits(
    settings: Settings, questions: dict[str, Questions], prompt: Context, *, fleet: Fleet, tell: Callable[[str], None]
) -> None:
    """Name by file and row what cannot be played. What stands around a question is taken to be as long as in the first prompt."""
    beside = around(questions["train"][0], prompt, settings, fleet.renderer)
    for split, of_split in questions.items():
        prompts = Prompts(settings, fleet.renderer, around=beside)
        found = survey(of_split, look=prompts.look)
        for line in found.warnings[:SHOWN_MISFITS]:
            tell(f"warning: task.data.{split}: {line}")
        num_more = len(found.warnings[SHOWN_MISFITS:]) + found.num_more_warnings
        if num_more:
            tell(f"warning: task.data.{split}: and {num_more} more; launch/doctor.py lists them")
        prompts.require_played(split, num=len(of_split), told="".join(found.warnings[:1]))
