"""One row of the table of known failures."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of RL of vision-language models that was reported publicly."""

    symptom: str
    """Symptom that a user sees, in one line."""
    seen: str
    """Public reports of the symptom, such as `verl#1640, trl#3847`."""
    here: str
    """Behavior of this program in the same situation, in one line."""
    guide: str = ""
    """Page of docs/ that describes it, with an anchor if it has one."""
