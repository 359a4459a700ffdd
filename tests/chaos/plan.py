"""What happens to the run of a seed: which run it is, and what is done to whom, and when. A seed alone decides.

A moment is a number of recorded steps and a share of the next: on a slow machine the same mishap meets the same part of the run.
"""

import random
from dataclasses import dataclass

RANKS = (
    "kill rank", "term rank", "pause rank", "hold rank", "slow rank", "fill disk", "remove folder", "nan reward", "nan loss", "jump clock",
)  # fmt: skip
BOXES = ("kill worker", "pause worker", "slow worker", "kill zygote", "term zygote", "pause zygote", "hold zygote")
SERVERS = (
    "kill judge", "pause judge", "kill server", "pause server", "cut judge", "cut server", "slow server", "lie type", "lie one",
    "change data",
)  # fmt: skip
DISKS = ("slow disk", "stall disk", "hang disk", "protect disk", "protect disk", "fill segments", "fill segments")
SECONDS = ("start second", "start second", "kill engine", "pause engine")
PAIRS = ("kill speaker_run", "kill listener_run", "pause speaker_run", "kill speaker_service", "kill listener_service")
MISHAPS = {"number_line": RANKS, "visual_search": (*BOXES, *BOXES, *RANKS), "vqa": (*SERVERS, *SERVERS, *BOXES, *RANKS)}
"""By run, of which the seeds take turns. What stands twice comes twice as often."""
LATER_MISHAPS = {
    "number_line": (*DISKS, *DISKS, "kill rank", "fill disk", "jump clock"),
    "shared_engine": (*SECONDS, "kill rank", "protect disk"),
    "lewis_pair": PAIRS,
}
"""Of the seeds from LATER on: what was added when the plans of those before were already played."""
LATER = 1000
STEPS = {"number_line": 3, "visual_search": 2, "vqa": 2, "shared_engine": 12, "lewis_pair": 2}
"""How long each run is."""
SLOW_ROUNDS, SLOW_S = 6, 0.8
"""Slow: so many pauses, each so long, with as much time between them."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Mishap:
    what: str
    """kill (SIGKILL), term (SIGTERM), pause (SIGSTOP for a while), hold (SIGSTOP for ever), ... and whom: rank, worker, zygote, ..."""
    number: int
    """Which of several: a rank, or what is found modulo their number."""
    after: int
    """Steps that the run has recorded."""
    share: float
    """From then on: a share of what the undisturbed run took to its next step."""
    lasts_s: float
    """Until it is taken back, if it can be."""
    life: int = 0
    """Of the run: 0 is its first, 1 that which goes on behind it."""

    def __str__(self) -> str:
        return f"{self.what} {self.number} after {self.after} steps and {self.share:.2f} for {self.lasts_s:.1f} s, life {self.life}"


@dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    seed: int
    run: str
    mishaps: tuple[Mishap, ...]


def plan(seed: int) -> Plan:
    """One mishap, two after each other (perhaps in two lives), or three at once."""
    dice = random.Random(f"chaos {seed}")
    table = MISHAPS if seed < LATER else LATER_MISHAPS
    run = list(table)[seed % len(table)]
    kinds = dice.choice(("one", "one", "two", "three"))
    num = {"one": 1, "two": 2, "three": 3}[kinds]
    what = dice.sample(sorted(set(table[run])), num) if kinds == "three" else dice.choices(table[run], k=num)
    first = _moment(dice, run)
    moments = [first] * num if kinds == "three" else [first, *(_moment(dice, run) for _ in what[1:])]
    lives = [dice.choice((0, 0, 1)) if number and kinds == "two" else 0 for number in range(num)]
    return Plan(seed=seed, run=run, mishaps=tuple(_mishap(dice, *each) for each in zip(what, moments, lives, strict=True)))


def _moment(dice: random.Random, run: str) -> tuple[int, float]:
    return dice.randrange(STEPS[run]), dice.random()


def _mishap(dice: random.Random, what: str, moment: tuple[int, float], life: int) -> Mishap:
    after, share = moment
    return Mishap(what=what, number=dice.randrange(4), after=after, share=share, lasts_s=dice.uniform(2, 12), life=life)
