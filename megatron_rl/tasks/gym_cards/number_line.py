"""NumberLine of GymCards: rules as pure functions, rendering, and gymnasium environment.

A state is (current, target). Both numbers are in 0..5, or in 0..max_number in evaluations beyond
the training range. Actions are indices into ACTIONS: 0 is "-", 1 is "+".

The rules are the same as in RL4VLM (arXiv 2405.10292). There are two differences from RL4VLM. The
environment has its own random number generator, so reset(seed) is reproducible. The font is
included in this package (DejaVu Sans Bold, license in fonts/).
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from megatron_rl.config import require

NumberLineState = tuple[int, int]
ACTIONS = ("-", "+")
MAX_NUMBER = 5
MAX_STEPS = 2 * MAX_NUMBER
IMAGE_SIZE = 300
FONT_FILE = Path(__file__).parent / "fonts" / "DejaVuSans-Bold.ttf"
NUMBER_PAIRS: tuple[NumberLineState, ...] = tuple(product(range(MAX_NUMBER + 1), range(MAX_NUMBER + 1)))
STATES: tuple[NumberLineState, ...] = tuple((current, target) for current, target in NUMBER_PAIRS if current != target)
"""All 30 states in which the current number differs from the target."""


def deal_start(current: int, target: int) -> NumberLineState:
    """Return the start state for two uniformly drawn numbers.

    If the numbers are equal, the target becomes (target + 1) mod 5. Example: (2, 2) becomes (2, 3),
    and (5, 5) becomes (5, 1).
    """
    return current, (target + 1) % MAX_NUMBER if target == current else target


@cache
def start_probabilities() -> dict[NumberLineState, Fraction]:
    """Return the exact probability of each of the 30 start states.

    Six start states result from two of the 36 possible draws and have probability 2/36. All other
    start states have probability 1/36.
    """
    dealt = [deal_start(*pair) for pair in NUMBER_PAIRS]
    return {state: Fraction(dealt.count(state), len(dealt)) for state in STATES}


def apply_action(state: NumberLineState, action: int, *, max_number: int = MAX_NUMBER) -> tuple[NumberLineState, int]:
    """Return the next state and the reward.

    The reward is 1 if the action reaches the target, -1 if the distance to the target does not
    decrease, and 0 otherwise. An action that would move the current number beyond the end of the
    number line has no effect.
    """
    current, target = state
    moved = min(max(current + (1 if action == 1 else -1), 0), max_number)
    if moved == target:
        return (moved, target), 1
    return (moved, target), -1 if abs(moved - target) >= abs(current - target) else 0


def optimal_action(state: NumberLineState) -> int:
    """Return the action that reduces the distance to the target."""
    current, target = state
    assert current != target, f"nothing to do at {state}"
    return int(current < target)


def compute_policy_success(action_probabilities: Mapping[NumberLineState, Sequence[float]], *, max_turns: int = MAX_STEPS) -> float:
    """Return the exact probability of a return above 0, by backward induction over the turns.

    The policy's action depends only on the state. The start states have the training distribution.

    Args:
        action_probabilities: Probabilities of ACTIONS in each state. If the probabilities sum to
            less than 1, the remainder is the probability of an invalid reply. An episode with an
            invalid reply or a wrong move has a return of at most 0, because each mistake has reward
            -1 and reaching the target has reward 1.
        max_turns: Maximum number of turns in an episode.
    """
    success = {state: 0.0 for state in STATES}
    for _ in range(max_turns):
        longer = {}
        for state in STATES:
            outcomes = [apply_action(state, action) for action in range(len(ACTIONS))]
            worth = [1.0 if reward == 1 else success[after] if reward == 0 else 0.0 for after, reward in outcomes]
            longer[state] = sum(p * value for p, value in zip(action_probabilities[state], worth, strict=True))
        success = longer
    return sum(float(probability) * success[state] for state, probability in start_probabilities().items())


@cache
def draw_state(state: NumberLineState) -> Image.Image:
    """Return the RGB image of a state, 300 x 300 pixels, black on white.

    The image is cached and shared by all turns in this state: do not modify it.
    """
    # Images must be identical on every machine. Pillow's default layout depends on the machine: it
    # uses the text shaper Raqm if Raqm is installed. The basic layout is always the same.
    font = ImageFont.truetype(FONT_FILE, 36, layout_engine=ImageFont.Layout.BASIC)
    drawn = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    pen = ImageDraw.Draw(drawn)
    current, target = state
    pen.text((30, 60), f"Target: {target}", fill="black", font=font)
    pen.text((30, 180), f"Current: {current}", fill="black", font=font)
    return drawn


@cache
def state_pixels(state: NumberLineState) -> NDArray[np.uint8]:
    """Return the image of a state as an array.

    The array is cached and shared: do not modify it.
    """
    return np.array(draw_state(state))


def pixels_space() -> gymnasium.spaces.Box[np.uint8]:
    """Return the observation space of a game with image observations.

    The space stores bounds for every pixel, so its construction takes 0.2 ms. Games therefore
    construct the space on first access.
    """
    return gymnasium.spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)


class NumberLine(gymnasium.Env[NDArray[np.uint8], int]):
    """`gym_cards/NumberLine-v0`: move from the current number to the target in steps of one.

    An episode has at most 2 * max_number steps, 10 by default. An observation is a uint8 array of
    shape [300, 300, 3]. Calling `reset(options={"current": c, "target": t})` sets the start state.
    Without options, the start state is random.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space: gymnasium.spaces.Discrete

    def __init__(self, *, max_number: int = MAX_NUMBER, render_mode: str | None = None) -> None:
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))
        self.max_number, self.render_mode = max_number, render_mode
        self.state: NumberLineState | None = None
        self.num_steps = 0

    @cached_property
    def observation_space(self) -> gymnasium.Space[NDArray[np.uint8]]:
        """Space of image observations."""
        return pixels_space()

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[NDArray[np.uint8], dict[str, int]]:
        """Start an episode and return the observation and the info dict."""
        super().reset(seed=seed)
        self.num_steps = 0
        dealt = deal_start(*self.np_random.integers(MAX_NUMBER + 1, size=2).tolist())
        self.state = _read_fixed_start(options, self.max_number) if options else dealt
        return self.render(), self._info()

    def step(self, action: int) -> tuple[NDArray[np.uint8], int, bool, bool, dict[str, int]]:
        """Apply an action and return gymnasium's step tuple."""
        assert self.state is not None, "step before reset"
        require(self.action_space.contains(action), "action", action, "use 0 for '-' or 1 for '+'")
        self.state, reward = apply_action(self.state, action, max_number=self.max_number)
        self.num_steps += 1
        terminated = reward == 1
        return self.render(), reward, terminated, not terminated and self.num_steps >= 2 * self.max_number, self._info()

    def render(self) -> NDArray[np.uint8]:
        """Return the observation as a new array."""
        assert self.state is not None, "render before reset"
        return state_pixels(self.state).copy()

    def _info(self) -> dict[str, int]:
        assert self.state is not None
        current, target = self.state
        return {"Current": current, "Target": target}


def _read_fixed_start(options: Mapping[str, object], max_number: int) -> NumberLineState:
    require(options.keys() == {"current", "target"}, "options", dict(options), "must contain exactly the keys current and target")
    numbers = range(max_number + 1)
    chosen = [state for state in product(numbers, numbers) if state == (options["current"], options["target"]) and state[0] != state[1]]
    require(len(chosen) == 1, "options", dict(options), f"current and target must be different integers in 0..{max_number}")
    return chosen[0]
