"""Computes the plan of a seed: which run it starts, and which mishap happens to which process at
which time. The plan depends only on the seed.

A time is a number of recorded steps plus a fraction of the next step, so that on a slow machine a
mishap happens in the same part of the run.
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
"""Possible mishaps per run; seeds take the runs in turn. A mishap that occurs twice is twice as
likely.
"""
LATER_MISHAPS = {
    "number_line": (*DISKS, *DISKS, "kill rank", "fill disk", "jump clock"),
    "shared_engine": (*SECONDS, "kill rank", "protect disk"),
    "lewis_pair": PAIRS,
}
"""Possible mishaps per run for seeds from LATER on. They were added after the plans of earlier
seeds had been run, which must not change.
"""
LATER = 1000
STEPS = {"number_line": 3, "visual_search": 2, "vqa": 2, "shared_engine": 12, "lewis_pair": 2}
"""Number of steps of each run."""
SLOW_ROUNDS, SLOW_S = 6, 0.8
"""Number and duration in seconds of the pauses of a slow process. The gaps between pauses are
equally long.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class Mishap:
    what: str
    """Action and target: kill (SIGKILL), term (SIGTERM), pause (SIGSTOP for a while), hold (SIGSTOP
    forever), ... of a rank, worker, zygote, ...
    """
    number: int
    """Selects one of several targets: a rank, or an index modulo the number of processes found."""
    after: int
    """Number of steps recorded before the mishap."""
    share: float
    """Additional delay as a fraction of the time that the undisturbed run took for its next
    step.
    """
    lasts_s: float
    """Seconds until the mishap is reversed, if it is reversible."""
    life: int = 0
    """Attempt of the run in which the mishap happens: 0 is the first attempt, 1 the attempt that
    resumes it.
    """

    def __str__(self) -> str:
        return f"{self.what} {self.number} after {self.after} steps and {self.share:.2f} for {self.lasts_s:.1f} s, life {self.life}"


@dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    seed: int
    run: str
    mishaps: tuple[Mishap, ...]


def plan(seed: int) -> Plan:
    """Return the plan of a seed: one mishap, two in sequence (perhaps in two attempts), or three at
    once.
    """
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
