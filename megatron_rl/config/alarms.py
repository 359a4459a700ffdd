"""Settings of the alarms on a run's metrics."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice

ALARMS = (
    "held_out_falls", "judge_score_falls", "judge_agreement_falls", "one_term_dominates", "responses_grow", "responses_shrink",
    "tool_use_dies", "groups_collapse", "entropy_grows", "entropy_collapses", "kl_grows", "mismatch_grows", "duplicates_grow",
)  # fmt: skip
"""Names of the alarms, which are the keys of observe/alarm_rules.RULES."""

MIN_WINDOW = 4
"""Minimum of alarms.window; shorter windows contain too few steps to compare."""


@dataclass(kw_only=True, slots=True)
class AlarmSettings:
    """Warnings of stage=rl about metrics that look like a reward hack or a collapse."""

    window: int = 10
    """Number of steps over which medians of metrics are taken. Most alarms compare the last window
    with the first, so they need twice as many steps."""
    disable: list[str] = field(default_factory=list)
    """Names of alarms that are not raised, e.g. [tool_use_dies]; docs/alarms.md lists the names."""

    def __post_init__(self) -> None:
        require(self.window >= MIN_WINDOW, "alarms.window", self.window, f"must be at least {MIN_WINDOW} steps")
        for name in self.disable:
            require_choice("alarms.disable", name, ALARMS)
