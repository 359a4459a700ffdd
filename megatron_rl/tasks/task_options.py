"""Settings that a task of ours alone has, as task.options. They lie outside gym_cards/ so that the door knows them without gymnasium."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.config import require, require_choice
from megatron_rl.config.checks import require_address

CARD_ART_NAMES = ("large", "classic", "night")


@dataclass
class GameOptions:
    """What every game takes."""

    reading: str = "json"
    """How a reply is read: json takes one JSON object with an action, rl4vlm the only action that is named in a free text."""
    invalid: str = "penalize"
    """What a reply without an action does: penalize pays -1, repeat pays 0 and shows the same again, noop plays a move that changes nothing
    (the points games have one, a blank), random plays any action, as RL4VLM does."""

    def __post_init__(self) -> None:
        require_choice("task.options.reading", self.reading, ("json", "rl4vlm"))
        require_choice("task.options.invalid", self.invalid, ("penalize", "repeat", "noop", "random"))

    def refuse_noop(self) -> None:
        require(self.invalid != "noop", "task.options.invalid", self.invalid, "this game has no move that changes nothing; use repeat")


@dataclass
class NumberLineOptions(GameOptions):
    """What NumberLine takes besides."""

    eval_max_number: int = 5
    """Largest number of the line in evaluations; above 5 they hold the starts that training never deals: a number beyond 5 in each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_noop()
        require(5 <= self.eval_max_number <= 20, "task.options.eval_max_number", self.eval_max_number, "must be in 5..20")


@dataclass
class CardOptions(GameOptions):
    """What every game of cards takes besides."""

    eval_art: str = "large"
    """How cards are drawn in evaluations: large (as in training), classic or night."""
    eval_card_scale: float = 1.0
    """Size of a card in evaluations, as a share of its size in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.eval_art", self.eval_art, CARD_ART_NAMES)
        require(0.25 <= self.eval_card_scale <= 1, "task.options.eval_card_scale", self.eval_card_scale, "must be in 0.25..1")


@dataclass
class EZPointsOptions(CardOptions):
    """What EZPoints takes besides."""

    legacy_rules: bool = False
    """Whether training reads a formula as Python reads its text, as RL4VLM does: neighbors concatenate. Evaluations never do."""
    eval_target: int = 12
    """What is to be made in evaluations; in training it is 12."""


@dataclass
class Points24Options(CardOptions):
    """What Points24 takes besides."""

    legacy_rules: bool = False
    """Whether training reads a formula as Python reads its text, as RL4VLM does: 2 and 4 are 24, ** is a power, // divides without rest.
    Evaluations never do."""
    faces: str = "ten"
    """What J, Q and K count: ten, or rank (11, 12, 13)."""
    solvable: bool = False
    """Whether only hands are dealt that have a solution."""
    train_hands: int = 4096
    """Hands to train on."""
    eval_hands: int = 500
    """Hands to evaluate on, of numbers that no hand of training has."""
    eval_target: int = 24
    """What is to be made in evaluations; in training it is 24."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.faces", self.faces, ("ten", "rank"))
        for key, value in (("train_hands", self.train_hands), ("eval_hands", self.eval_hands)):
            require(value >= 1, f"task.options.{key}", value, "must be at least 1")


@dataclass
class BlackjackOptions(CardOptions):
    """What Blackjack takes besides."""

    natural: bool = False
    """Whether a win with an ace and a ten-valued card as dealt pays 1.5."""
    sab: bool = False
    """Whether the rules are those of Sutton and Barto: such a hand wins unless the dealer has one too; natural then has no say."""
    train_hands: int = 4096
    """Starts to train on: the player's two cards and the one that the dealer shows."""
    eval_drawings: int = 3
    """Hands in which an evaluation asks about each of the 280 positions, in drawings (suits) that no start of training has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_noop()
        for key, value in (("train_hands", self.train_hands), ("eval_drawings", self.eval_drawings)):
            require(value >= 1, f"task.options.{key}", value, "must be at least 1")


@dataclass
class AlfworldOptions:
    """What ALFWorld takes."""

    reading: str = "json"
    """How a reply is read: json takes one JSON object with an action, rl4vlm the first admissible command in a free text."""
    invalid: str = "penalize"
    """What a reply without a command does: penalize pays -1, repeat pays 0, random gives any command; no command changes nothing."""
    progress: str = "level"
    """What a step pays for the goal's conditions: level the share of them that holds (RL4VLM), change what it changed of that share."""
    observation: str = "both"
    """Where the text of an observation is: both in the picture and in the prompt, or in the picture alone."""
    eval_picture: str = "drawn"
    """What evaluations show: drawn as in training, or blank to see what a policy does without pictures."""
    history: int = 0
    """Commands before this one that the prompt lists at most; 0 lists none, as RL4VLM."""
    processes: int = 64
    """Processes of TextWorld at once, one an episode; further episodes wait for one."""
    call_s: float = 60.0
    """Seconds that TextWorld may take to begin a game or to play a command; after them the episode has failed."""

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
    """What both players of the Lewis game take."""

    variant: str = "code"
    """Whose numbers the rewards have where the game's two accounts differ: readme or code (tasks/lewis/rewards.py)."""
    log: str = ""
    """A file to which every prediction is written, one line of JSON each: time, reward, content, solution. Empty writes none."""

    def __post_init__(self) -> None:
        require_choice("task.options.variant", self.variant, ("readme", "code"))


@dataclass
class LewisSpeakerOptions(LewisOptions):
    """What the speaker takes besides."""

    parts: list[str] = field(default_factory=lambda: ["accuracy", "format"])
    """What the reward is the sum of: any of accuracy, format, length, overlap."""
    accuracy: str = ""
    """What accuracy pays: binary 1 for the right pick, soft_gated the listener's reward_score for it, soft_always that for any pick. Empty
    is the variant's own: soft_gated of the code, binary of the README, which knows no other."""
    held_out_listeners: dict[str, str] = field(default_factory=dict)
    """Addresses of listeners that hear held-out games and never reward, by the names of their figures: {frozen: http://HOST:9002}. One that
    is called frozen gives the drift: how much more often the partner picks the target than it does."""
    held_out_token_files: dict[str, str] = field(default_factory=dict)
    """Files with the tokens that witnesses ask for, by the same names; one that is not named is told none."""
    sheets: str = ""
    """A folder for a contact sheet of each evaluation: target, candidates, description, the listener's probabilities. Empty draws none."""

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
        """How accuracy is paid."""
        return self.accuracy or {"readme": "binary", "code": "soft_gated"}[self.variant]


@dataclass
class LewisListenerOptions(LewisOptions):
    """What the listener takes besides."""

    reward: str = "consistency"
    """What is asked and paid: consistency pays a right yes or no on two pictures, weighted punishes a wrong one, selection asks for the
    candidate that shows what the query shows, heard pays a right yes or no on a description and a picture, asked as the listener's service
    asks (both with rows as the speaker's; descriptions are those of task.speaker, or name colors where that has no address)."""

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
"""By task.name."""
