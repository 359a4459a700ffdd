"""Settings of individual built-in tasks (`task.options`).

They are defined outside of gym_cards/ so that the config can be validated without gymnasium.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.config import require, require_choice
from megatron_rl.config.checks import require_address

CARD_ART_NAMES = ("large", "classic", "night")


@dataclass
class GameOptions:
    """Options of every GymCards game."""

    reading: str = "json"
    """Reply format: json expects one JSON object with an action; rl4vlm accepts free text that
    names exactly one action.
    """
    invalid: str = "penalize"
    """Effect of a reply without an action: penalize pays -1, repeat pays 0 and repeats the
    observation, noop takes a move that changes nothing (points games only: a blank), random takes a
    random action, as RL4VLM does.
    """

    def __post_init__(self) -> None:
        require_choice("task.options.reading", self.reading, ("json", "rl4vlm"))
        require_choice("task.options.invalid", self.invalid, ("penalize", "repeat", "noop", "random"))

    def refuse_noop(self) -> None:
        """Raise ValueError if `invalid` is noop, which this game does not support."""
        require(self.invalid != "noop", "task.options.invalid", self.invalid, "this game has no move that changes nothing; use repeat")


@dataclass
class NumberLineOptions(GameOptions):
    """Options of NumberLine."""

    eval_max_number: int = 5
    """Largest number of the line in evaluations (5..20). Above 5, evaluation uses only starts that
    training never uses: those with a number beyond 5.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_noop()
        require(5 <= self.eval_max_number <= 20, "task.options.eval_max_number", self.eval_max_number, "must be in 5..20")


@dataclass
class CardOptions(GameOptions):
    """Options of every card game."""

    eval_art: str = "large"
    """Card art in evaluations: large (as in training), classic or night."""
    eval_card_scale: float = 1.0
    """Card size in evaluations, as a fraction of the size in training (0.25..1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.eval_art", self.eval_art, CARD_ART_NAMES)
        require(0.25 <= self.eval_card_scale <= 1, "task.options.eval_card_scale", self.eval_card_scale, "must be in 0.25..1")


@dataclass
class EZPointsOptions(CardOptions):
    """Options of EZPoints."""

    legacy_rules: bool = False
    """Evaluate training formulas as Python text, as RL4VLM does: adjacent numbers concatenate.
    Never applies to evaluations.
    """
    eval_target: int = 12
    """Target number in evaluations; training uses 12."""


@dataclass
class Points24Options(CardOptions):
    """Options of Points24."""

    legacy_rules: bool = False
    """Evaluate training formulas as Python text, as RL4VLM does: 2 followed by 4 is 24, ** is a
    power, // is integer division. Never applies to evaluations.
    """
    faces: str = "ten"
    """Value of J, Q and K: ten, or rank (11, 12, 13)."""
    solvable: bool = False
    """Deal only hands that have a solution."""
    train_hands: int = 4096
    """Number of training hands."""
    eval_hands: int = 500
    """Number of evaluation hands; no training hand has the same four numbers as one of them."""
    eval_target: int = 24
    """Target number in evaluations (1..100); training uses 24."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.faces", self.faces, ("ten", "rank"))
        for key, value in (("train_hands", self.train_hands), ("eval_hands", self.eval_hands)):
            require(value >= 1, f"task.options.{key}", value, "must be at least 1")


@dataclass
class BlackjackOptions(CardOptions):
    """Options of Blackjack."""

    natural: bool = False
    """Pay 1.5 for a win with an initial hand of an ace and a ten-valued card."""
    sab: bool = False
    """Use the rules of Sutton and Barto: an initial hand of an ace and a ten-valued card wins
    unless the dealer has one too. Overrides natural.
    """
    train_hands: int = 4096
    """Number of training starts: the player's two cards and the dealer's visible card."""
    eval_drawings: int = 3
    """Number of hands in which an evaluation queries each of the 280 positions; no training start
    has their suits.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_noop()
        for key, value in (("train_hands", self.train_hands), ("eval_drawings", self.eval_drawings)):
            require(value >= 1, f"task.options.{key}", value, "must be at least 1")


@dataclass
class AlfworldOptions:
    """Options of ALFWorld."""

    reading: str = "json"
    """Reply format: json expects one JSON object with an action; rl4vlm takes the first admissible
    command in free text.
    """
    invalid: str = "penalize"
    """Effect of a reply without an admissible command: penalize adds -1, repeat adds 0, random runs
    a random command. penalize and repeat leave the game unchanged.
    """
    progress: str = "level"
    """Step reward for the goal's conditions: level pays the fraction that holds (as RL4VLM), change
    pays the change of that fraction.
    """
    observation: str = "both"
    """Location of the observation text: both for image and prompt, picture for the image only."""
    eval_picture: str = "drawn"
    """Images in evaluations: drawn as in training, or blank to test the policy without images."""
    history: int = 0
    """Maximum number of previous commands listed in the prompt (0..50). 0 lists none, as RL4VLM."""
    processes: int = 64
    """Maximum number of TextWorld processes, one per episode; further episodes wait."""
    call_s: float = 60.0
    """Timeout in seconds for TextWorld to start a game or run a command; the episode fails when it
    is exceeded.
    """

    def __post_init__(self) -> None:
        require_choice("task.options.reading", self.reading, ("json", "rl4vlm"))
        require_choice("task.options.invalid", self.invalid, ("penalize", "repeat", "random"))
        require_choice("task.options.progress", self.progress, ("level", "change"))
        require_choice("task.options.observation", self.observation, ("both", "picture"))
        require_choice("task.options.eval_picture", self.eval_picture, ("drawn", "blank"))
        require(0 <= self.history <= 50, "task.options.history", self.history, "must be in 0..50")
        require(self.processes >= 1, "task.options.processes", self.processes, "must be at least 1")
        require(self.call_s > 0, "task.options.call_s", self.call_s, "must be positive")


@dataclass
class LewisOptions:
    """Options of both Lewis tasks."""

    variant: str = "code"
    """Source of the reward constants where the game's README and code differ: readme or code
    (tasks/lewis/rewards.py).
    """
    log: str = ""
    """JSON-lines file for predictions (time, reward, content, solution). Empty writes none."""

    def __post_init__(self) -> None:
        require_choice("task.options.variant", self.variant, ("readme", "code"))


@dataclass
class LewisSpeakerOptions(LewisOptions):
    """Options of the Lewis speaker."""

    parts: list[str] = field(default_factory=lambda: ["accuracy", "format"])
    """Reward terms to sum: any of accuracy, format, length, overlap."""
    accuracy: str = ""
    """Accuracy reward: binary pays 1 for a correct pick, soft_gated pays the listener's
    reward_score for a correct pick, soft_always pays it for any pick. Empty uses soft_gated with
    variant=code and binary with variant=readme, which allows only binary.
    """
    held_out_listeners: dict[str, str] = field(default_factory=dict)
    """Listener URLs that are used on held-out games only and never reward, by metric name: {frozen:
    http://HOST:9002}. A listener named frozen also defines the metric drift: partner accuracy minus
    its accuracy.
    """
    held_out_token_files: dict[str, str] = field(default_factory=dict)
    """Files with the access tokens of held-out listeners, by the same names. Listeners without an
    entry are sent no token.
    """
    sheets: str = ""
    """Folder for one contact sheet per evaluation: target, candidates, description and the
    listener's probabilities. Empty draws none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.accuracy", self.accuracy_mode, ("binary", "soft_gated", "soft_always"))
        has_soft = self.variant == "readme" and self.accuracy_mode != "binary"
        require(not has_soft, "task.options.accuracy", self.accuracy, "the game's README pays binary; use task.options.variant=code")
        for part in self.parts:
            require_choice("task.options.parts", part, ("accuracy", "format", "length", "overlap"))
        for name, url in self.held_out_listeners.items():
            require_address(f"task.options.held_out_listeners.{name}", url)
            require(
                url.startswith(("http://", "https://")),
                f"task.options.held_out_listeners.{name}",
                url,
                "is no address; give http://HOST:PORT",
            )
            taken = ("picked", "words", "accuracy", "format", "length", "overlap", "success", "return", "drift", "tool_use", "episodes")
            require(name not in taken, "task.options.held_out_listeners", name, "is the name of another figure; choose another")
        strangers = sorted({*self.held_out_token_files} - {*self.held_out_listeners})
        remedy = "names no witness; name it in task.options.held_out_listeners, too"
        require(not strangers, "task.options.held_out_token_files", strangers[0] if strangers else "", remedy)
        require(len({*self.parts}) == len(self.parts) > 0, "task.options.parts", self.parts, "names no part, or one twice")
        has_overlap = "overlap" in self.parts and self.variant == "readme"
        require(not has_overlap, "task.options.parts", self.parts, "the game's README has no overlap; use task.options.variant=code")

    @property
    def accuracy_mode(self) -> str:
        """Effective accuracy mode: `accuracy`, or the default of `variant` if it is empty."""
        return self.accuracy or {"readme": "binary", "code": "soft_gated"}[self.variant]


@dataclass
class LewisListenerOptions(LewisOptions):
    """Options of the Lewis listener."""

    reward: str = "consistency"
    """Question and reward: consistency pays a correct yes/no on two images, weighted also penalizes
    a wrong one, selection asks for the candidate that shows the same object as the query, heard
    pays a correct yes/no on a description and one image, with the listener service's prompt.
    selection and heard read speaker rows; the descriptions of heard come from task.speaker, or name
    colors if it has no URL.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.reward", self.reward, ("consistency", "weighted", "selection", "heard"))


TASK_OPTIONS: Mapping[str, type] = {
    "alfworld": AlfworldOptions,
    "lewis_listener": LewisListenerOptions,
    "lewis_speaker": LewisSpeakerOptions,
    "number_line": NumberLineOptions,
    "ez_points": EZPointsOptions,
    "points24": Points24Options,
    "blackjack": BlackjackOptions,
}
"""Maps task.name to its options dataclass."""
