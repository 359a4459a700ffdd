"""Task-specific options of the built-in tasks (`task.options`).

The classes are defined outside of tasks/, so that configs can be validated without importing tasks
and their libraries.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.checks import require, require_choice, require_url

CARD_ART_NAMES = ("large", "classic", "night")


@dataclass
class GameOptions:
    """Options shared by all GymCards games."""

    reading: str = "json"
    """Reply format: json expects one JSON object with an action; rl4vlm accepts free text that
    names exactly one action.
    """
    invalid: str = "penalize"
    """Effect of a reply without a valid action: penalize gives reward -1 and repeats the
    observation; repeat gives reward 0 and repeats the observation; noop gives reward 0 and appends
    a blank to the formula (only EZPoints and Points24); random takes a random action, as RL4VLM
    does.
    """

    def __post_init__(self) -> None:
        require_choice("task.options.reading", self.reading, ("json", "rl4vlm"))
        require_choice("task.options.invalid", self.invalid, ("penalize", "repeat", "noop", "random"))

    def refuse_noop(self) -> None:
        """Raise ValueError if `invalid` is noop, which this game does not support."""
        require(self.invalid != "noop", "task.options.invalid", self.invalid, "not supported by this game; use repeat")


@dataclass
class NumberLineOptions(GameOptions):
    """Options of NumberLine."""

    eval_max_number: int = 5
    """Largest number on the number line in evaluations (5..20). With a value above 5, evaluations
    use only initial states with a current or target number above 5, which never occur in training.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_noop()
        require(5 <= self.eval_max_number <= 20, "task.options.eval_max_number", self.eval_max_number, "must be in 5..20")


@dataclass
class CardOptions(GameOptions):
    """Options shared by all card games."""

    eval_art: str = "large"
    """Card art in evaluations: large (as in training), classic or night."""
    eval_card_scale: float = 1.0
    """Card size in evaluations, as a fraction of the size in the game (0.25..1)."""
    train_arts: list[str] = field(default_factory=lambda: ["large"])
    """Card arts in training; every hand and every demonstration has a random one of them."""
    train_card_scales: list[float] = field(default_factory=lambda: [1.0])
    """Card sizes in training, as fractions of the size in the game (0.25..1); every hand and every
    demonstration has a random one of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, arts in (("eval_art", [self.eval_art]), ("train_arts", self.train_arts)):
            for art in arts or [""]:
                require_choice(f"task.options.{key}", art, CARD_ART_NAMES)
        for key, scales in (("eval_card_scale", [self.eval_card_scale]), ("train_card_scales", self.train_card_scales)):
            for scale in scales or [0.0]:
                require(0.25 <= scale <= 1, f"task.options.{key}", scale, "must be in 0.25..1")

    @property
    def eval_style(self) -> tuple[str, float]:
        """Card art and card size in evaluations."""
        return self.eval_art, self.eval_card_scale

    def draw_train_style(self, rng: random.Random) -> tuple[str, float]:
        """Return a random card art and card size for training."""
        return rng.choice(self.train_arts), rng.choice(self.train_card_scales)


@dataclass
class EZPointsOptions(CardOptions):
    """Options of EZPoints."""

    legacy_rules: bool = False
    """In training, evaluate formulas as Python expressions, as RL4VLM does: adjacent numbers are
    concatenated. Evaluations always use the strict rules.
    """
    eval_target: int = 12
    """Target number in evaluations; training uses 12."""


@dataclass
class Points24Options(CardOptions):
    """Options of Points24."""

    legacy_rules: bool = False
    """In training, evaluate formulas as Python expressions, as RL4VLM does: 2 followed by 4 is 24,
    ** is a power, // is integer division. Evaluations always use the strict rules.
    """
    faces: str = "ten"
    """Values of J, Q and K: ten counts each of them as 10; rank counts them as 11, 12 and 13."""
    solvable: bool = False
    """Deal only hands that have a solution."""
    train_hands: int = 4096
    """Number of training hands."""
    eval_hands: int = 500
    """Number of evaluation hands. No set of four numbers is used in both training and
    evaluation."""
    eval_target: int = 24
    """Target number in evaluations (1..100); training uses 24."""
    demonstration_targets: list[int] = field(default_factory=lambda: [24])
    """Target numbers of demonstrations (1..100); each has a random one of them."""
    thoughts: str = "formula"
    """Thoughts of demonstrations: formula writes the formula; search writes a search for it, and
    then the formula."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.faces", self.faces, ("ten", "rank"))
        require_choice("task.options.thoughts", self.thoughts, ("formula", "search"))
        for target in self.demonstration_targets or [0]:
            require(target in range(1, 101), "task.options.demonstration_targets", target, "must be in 1..100")
        for key, value in (("train_hands", self.train_hands), ("eval_hands", self.eval_hands)):
            require(value >= 1, f"task.options.{key}", value, "must be at least 1")


@dataclass
class BlackjackOptions(CardOptions):
    """Options of Blackjack."""

    natural: bool = False
    """Give reward 1.5 for a win with a natural (an ace and a ten-valued card as the initial
    hand).
    """
    sab: bool = False
    """Use the rules of Sutton and Barto: a natural (an ace and a ten-valued card as the initial
    hand) wins unless the dealer also has a natural. The option sab overrides the option natural.
    """
    train_hands: int = 4096
    """Number of initial hands in training. An initial hand consists of the player's two cards and
    the dealer's visible card.
    """
    eval_drawings: int = 3
    """Number of evaluation hands for each of the 280 game states in which the player has a choice.
    Initial hands in training never use the suit combinations of evaluation hands.
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
    """Reply format: json expects one JSON object with an action; rl4vlm accepts free text and uses
    the alphabetically first admissible command in that text.
    """
    invalid: str = "penalize"
    """Effect of a reply without an admissible command: penalize adds -1 to the step reward, repeat
    adds 0, random runs a random admissible command. penalize and repeat leave the game unchanged.
    """
    progress: str = "level"
    """Step reward for progress: level is the fraction of the goal's conditions that are met after
    the step, as in RL4VLM; change is the change in that fraction during the step.
    """
    observation: str = "both"
    """Location of the observation text: both puts the text into the image and the prompt; picture
    puts the text only into the image.
    """
    eval_picture: str = "drawn"
    """Images in evaluations: drawn as in training, or blank to test the policy without visual
    input.
    """
    history: int = 0
    """Maximum number of previous commands listed in the prompt (0..50). 0 lists no commands, as in
    RL4VLM.
    """
    processes: int = 64
    """Maximum number of TextWorld processes. Each running episode uses one process; further
    episodes wait for a free process.
    """
    call_s: float = 60.0
    """Timeout in seconds for TextWorld to start a game or run a command. The episode fails if the
    timeout is exceeded.
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
class GymnasiumOptions:
    """Options of gymnasium environments."""

    id: str = ""
    """Id of a registered environment. As in gymnasium, a module before a colon is imported first:
    my_module:MyEnv-v0. Register wrappers together with an environment in such a module.
    """
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of gymnasium.make, such as those of the environment and
    max_episode_steps.
    """
    image_side: int = 224
    """Longer side of the images in pixels, to which the frames of the environment are scaled (by
    repeating pixels if they are smaller). 0 does not scale them.
    """
    history: int = 1
    """Number of frames in the prompt: the current one and those before it, with the actions between
    them. Every turn starts a new prompt.
    """
    actions: list[str] = field(default_factory=list)
    """Names of the actions of a Discrete space, in the order of the action numbers. Empty takes
    them from the environment: its enum `actions` or its method `get_action_meanings`. Otherwise,
    actions are numbers.
    """
    prompt: str = ""
    """Prompt after the image. {observation} is replaced by the texts in the observation, such as a
    mission, and {actions} by the format of an action. Empty uses a prompt with both.
    """
    invalid: str = "penalize"
    """Effect of a reply without a valid action: penalize gives reward -1, repeat gives reward 0,
    random takes a random action. penalize and repeat do not step the environment.
    """
    reply: str = "json"
    """Format of a reply: json is one JSON object with the action, and tags is
    <think>TEXT</think><answer>ACTION</answer>. tags supports only Discrete spaces.
    """
    actions_per_turn: int = 1
    """Maximum number of actions in a reply with reply=tags, separated by commas. The environment
    takes them one after the other, until the episode ends.
    """
    format_reward: float = 0.0
    """Reward added to every turn with a valid reply."""
    success_reward: float | None = None
    """Minimum return of a solved episode, without the rewards and penalties for the format of
    replies. null uses success in the info of the last step if the environment sets it; otherwise, a
    return above 0 counts as solved.
    """
    train_seeds: int = 4096
    """Number of training examples. Each is a seed of the environment's reset, counted from 0."""
    eval_seeds: int = 100
    """Number of evaluation examples. Their seeds are not used in training."""
    processes: int = 64
    """Maximum number of processes. Each running episode has its own process; further episodes wait.
    """
    step_timeout_s: float = 60.0
    """Timeout in seconds for the environment to be created, reset, stepped or closed. The episode
    fails if the timeout is exceeded.
    """

    def __post_init__(self) -> None:
        taken = sorted({"id", "render_mode", "disable_env_checker"} & {*self.kwargs})
        require(not taken, "task.options.kwargs", taken[0] if taken else "", "is set by task=gymnasium; remove it")
        require(
            self.image_side == 0 or 28 <= self.image_side <= 4096, "task.options.image_side", self.image_side, "must be 0 or in 28..4096"
        )
        require(1 <= self.history <= 64, "task.options.history", self.history, "must be in 1..64")
        require(len({*self.actions}) == len(self.actions), "task.options.actions", self.actions, "contains a name twice")
        require("" not in self.actions, "task.options.actions", self.actions, "contains an empty name")
        require_choice("task.options.invalid", self.invalid, ("penalize", "repeat", "random"))
        require_choice("task.options.reply", self.reply, ("json", "tags"))
        require(1 <= self.actions_per_turn <= 64, "task.options.actions_per_turn", self.actions_per_turn, "must be in 1..64")
        remedy = "needs task.options.reply=tags; a JSON object has one action"
        require(self.reply == "tags" or self.actions_per_turn == 1, "task.options.actions_per_turn", self.actions_per_turn, remedy)
        require(math.isfinite(self.format_reward), "task.options.format_reward", self.format_reward, "must be a finite number")
        for key, value in (("train_seeds", self.train_seeds), ("eval_seeds", self.eval_seeds)):
            require(1 <= value <= 1_000_000, f"task.options.{key}", value, "must be in 1..1000000")
        require(self.processes >= 1, "task.options.processes", self.processes, "must be at least 1")
        require(self.step_timeout_s > 0, "task.options.step_timeout_s", self.step_timeout_s, "must be positive")


@dataclass
class AgentOptions:
    """Options of task=agent."""

    command: list[str] = field(default_factory=list)
    """Program and arguments of the agent, e.g. [python,my_agent.py]; one process per episode. The
    program is looked up in PATH and runs in a folder of its own with the question in example.json,
    so name files by absolute paths. {question} in an argument is replaced by the question's text.
    """
    url: str = ""
    """Address of a service that runs the agents, in place of a command. Each episode is one POST
    request, which is answered when the agent has ended (docs/own_agents.md).
    """
    host: str = "127.0.0.1"
    """Address on which the run listens for the agents' requests. Agents on other machines need an
    address of this machine; requests need a key in any case.
    """
    processes: int = 64
    """Maximum number of agents that run at the same time; further episodes wait."""
    ignore: list[str] = field(default_factory=list)
    """Settings of requests that are ignored and counted instead of rejected, e.g.
    [response_format]. The policy does not follow them.
    """
    sandbox: bool = False
    """True to run the command in the sandbox: it sees its folder, the paths in sandbox_paths, the
    system's programs and this run's Python environment, and reaches only the run's endpoint.
    """
    sandbox_paths: list[str] = field(default_factory=list)
    """Files and folders that the command needs in the sandbox, e.g. [/home/me/my_agent.py]. They
    are read-only. Every user of the machine must be able to read them if the run has root rights.
    """
    train_abandoned: bool = True
    """True to train on abandoned responses as well. Of several responses to the same messages,
    those are abandoned that the agent did not continue although it continued another one.
    """

    def __post_init__(self) -> None:
        require(self.processes >= 1, "task.options.processes", self.processes, "must be at least 1")
        if self.url:
            require_url("task.options.url", self.url, path="/PATH")
        remedy = "isolates a command; remove it, or set task.options.command"
        require(not (self.sandbox and self.url), "task.options.sandbox", self.sandbox, remedy)
        remedy = "with task.options.sandbox=true, the run listens on 127.0.0.1; remove this setting"
        require(not self.sandbox or self.host == "127.0.0.1", "task.options.host", self.host, remedy)
        remedy = "has an effect only with task.options.sandbox=true"
        require(self.sandbox or not self.sandbox_paths, "task.options.sandbox_paths", self.sandbox_paths, remedy)
        for path in self.sandbox_paths:
            require(Path(path).is_absolute(), "task.options.sandbox_paths", path, "is not an absolute path")


@dataclass
class LewisOptions:
    """Options shared by the Lewis speaker and listener tasks."""

    variant: str = "code"
    """Source of the reward constants (tasks/lewis/rewards.py): readme or code. The README and the
    code of the original game define different constants.
    """
    log: str = ""
    """JSON-lines file to which predictions are written (time, reward, content, solution). If empty,
    predictions are not written.
    """

    def __post_init__(self) -> None:
        require_choice("task.options.variant", self.variant, ("readme", "code"))


@dataclass
class LewisSpeakerOptions(LewisOptions):
    """Options of the Lewis speaker."""

    parts: list[str] = field(default_factory=lambda: ["accuracy", "format"])
    """Reward terms to sum: any of accuracy, format, length, overlap."""
    word_cost: float = 0.0
    """Cost of each word of the description (coarse and detailed part), which is subtracted from the
    reward."""
    accuracy: str = ""
    """Accuracy reward: binary is 1 if the listener picks the target, soft_gated is the listener's
    reward_score if it picks the target, soft_always is the reward_score of any pick. Empty selects
    soft_gated for variant=code and binary for variant=readme; variant=readme supports only binary.
    """
    held_out_listeners: dict[str, str] = field(default_factory=dict)
    """URLs of listeners that only measure accuracy on held-out games and never contribute to the
    reward, keyed by metric name, e.g. {frozen: http://HOST:9002}. If a listener is
    named frozen, the metric drift is the partner's accuracy minus the accuracy of frozen.
    """
    held_out_token_files: dict[str, str] = field(default_factory=dict)
    """Files with the access tokens of held-out listeners, keyed by the names in held_out_listeners.
    Listeners without an entry receive no token.
    """
    sheets: str = ""
    """Folder to which every evaluation adds a contact sheet: target, candidates, description and
    the listener's probabilities. Empty disables contact sheets.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.accuracy", self.accuracy_mode, ("binary", "soft_gated", "soft_always"))
        has_soft = self.variant == "readme" and self.accuracy_mode != "binary"
        require(
            not has_soft,
            "task.options.accuracy",
            self.accuracy,
            "variant=readme supports only binary accuracy; use task.options.variant=code",
        )
        require(0 <= self.word_cost < math.inf, "task.options.word_cost", self.word_cost, "must be a finite, non-negative number")
        for part in self.parts:
            require_choice("task.options.parts", part, ("accuracy", "format", "length", "overlap"))
        for name, url in self.held_out_listeners.items():
            require_url(f"task.options.held_out_listeners.{name}", url)
            taken = ("picked", "words", "accuracy", "format", "length", "overlap", "success", "return", "drift", "tool_use", "episodes")
            require(name not in taken, "task.options.held_out_listeners", name, "is the name of another metric; choose another name")
        strangers = sorted({*self.held_out_token_files} - {*self.held_out_listeners})
        remedy = "is not a held-out listener; add it to task.options.held_out_listeners"
        require(not strangers, "task.options.held_out_token_files", strangers[0] if strangers else "", remedy)
        require(len({*self.parts}) == len(self.parts) > 0, "task.options.parts", self.parts, "must not be empty or contain duplicates")
        has_overlap = "overlap" in self.parts and self.variant == "readme"
        require(not has_overlap, "task.options.parts", self.parts, "variant=readme has no overlap reward; use task.options.variant=code")

    @property
    def accuracy_mode(self) -> str:
        """Value of `accuracy` or, if `accuracy` is empty, the default for `variant`."""
        return self.accuracy or {"readme": "binary", "code": "soft_gated"}[self.variant]


@dataclass
class LewisListenerOptions(LewisOptions):
    """Options of the Lewis listener."""

    reward: str = "consistency"
    """Question that the listener is trained to answer. consistency: whether two images show the
    same object. weighted: like consistency, but with a penalty for wrong answers. selection: which
    candidate shows the same object as the query. heard: whether a description fits an image (with
    the same prompt as the listener service). The data for selection and heard consists of rows of
    the speaker's dataset. For heard, task.speaker generates the descriptions; without a speaker
    URL, each description lists the colors of the object.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("task.options.reward", self.reward, ("consistency", "weighted", "selection", "heard"))


TASK_OPTIONS: Mapping[str, type] = {
    "agent": AgentOptions,
    "alfworld": AlfworldOptions,
    "gymnasium": GymnasiumOptions,
    "lewis_listener": LewisListenerOptions,
    "lewis_speaker": LewisSpeakerOptions,
    "number_line": NumberLineOptions,
    "ez_points": EZPointsOptions,
    "points24": Points24Options,
    "blackjack": BlackjackOptions,
}
"""Maps each value of task.name to the options dataclass of the task."""
