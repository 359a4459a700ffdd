"""A plain function as a reward: sync or async, its arguments picked by name, a number or None returned.

    def short(reply):                        def right(reply, answer):
        return -len(reply) / 1000                return float(answer in reply)

What goes wrong in it fails the rollout, as any trouble that is not the policy's, and says which function on which example.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from numbers import Real

from megatron_rl.config import require
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rewards.rubric import RewardFn, RewardInput, RewardTerm, Rubric

REWARD_ARGUMENTS: Mapping[str, Callable[[RewardInput], object]] = {
    "question": lambda outcome: outcome.payload["question"],
    "reply": lambda outcome: outcome.replies[-1],
    "answer": lambda outcome: outcome.payload["answer"],
    "turns": lambda outcome: outcome.turns,
    "rollout": lambda outcome: outcome.rollout,
    "extra": lambda outcome: outcome.payload["extra"],
}
"""What a function may ask for: the example's question, its answer and its other columns, the last reply, types.Turn of every reply, the
whole types.Rollout."""


def from_function(reward_names: str, rubric: Rubric, user_functions: Mapping[str, Callable[..., object]]) -> Rubric:
    """The rubric of task.reward, `reward_names`: names joined by +. `rubric` is that of what is not one of the user's `user_functions`
    functions.

    Functions alone replace it; beside another name they are further parts of it.
    """
    names = [name for name in reward_names.split("+") if name in user_functions]
    if not names:
        return rubric
    parts = {name: RewardTerm(wrap_reward_function(name, user_functions[name])) for name in names}
    if names == reward_names.split("+"):
        return Rubric(terms=parts, solved_term=names[0])
    return Rubric(terms={**rubric.terms, **parts}, turn_terms=rubric.turn_terms, vetoes=rubric.vetoes, solved_term=rubric.solved_term)


def wrap_reward_function(name: str, function: Callable[..., object]) -> RewardFn:
    """ValueError: it is no function, or asks for what there is not."""
    require(inspect.isfunction(function) or inspect.ismethod(function), f"rewards[{name!r}]", function, "is no function written in Python")
    parameters = inspect.signature(function).parameters.values()
    asked = [argument for argument in parameters if argument.name in REWARD_ARGUMENTS or argument.default is inspect.Parameter.empty]
    for argument in asked:
        known = argument.name in REWARD_ARGUMENTS and argument.kind is not inspect.Parameter.POSITIONAL_ONLY
        require(known, f"rewards[{name!r}]", f"({', '.join(map(str, asked))})", f"its arguments may be {', '.join(REWARD_ARGUMENTS)}")

    async def reward(outcome: RewardInput) -> float | None:
        example = outcome.rollout.example_id
        try:
            given = {argument.name: REWARD_ARGUMENTS[argument.name](outcome) for argument in asked}
        except KeyError as lacking:
            raise PermanentInfraError(f"reward {name} on {example}: the task's examples have no {lacking}") from lacking
        try:
            value = function(**given)
            if inspect.isawaitable(value):
                value = await value
        except InfraError:
            raise
        except Exception as error:  # the user's code may raise whatever it likes, and one reply of a thousand does not end a run
            frames = traceback.extract_tb(error.__traceback__)
            place = [frame for frame in frames if frame.filename == inspect.getsourcefile(function)] or frames
            told = f"{type(error).__name__}: {error} ({place[-1].filename}:{place[-1].lineno})"
            raise PermanentInfraError(f"reward {name} on {example}: {told}") from error
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise PermanentInfraError(f"reward {name} on {example}: gave {value!r}; a finite number or None is needed")
        return None if value is None else float(value)

    return reward
