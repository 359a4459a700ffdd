"""Rewards defined by plain functions.

A reward function may be sync or async, and must return a number or None. Arguments are passed by
name, as in these examples:

    def short(reply):                        def right(reply, answer):
        return -len(reply) / 1000                return float(answer in reply)

Functions in the form of TRL are accepted too. They receive lists, of one completion here, and
return a list:

    def right(completions, answer, **kwargs):
        return [float(gold in reply[0]["content"]) for reply, gold in zip(completions, answer)]

If the function raises an exception, the rollout fails with an infrastructure error that names the
function and the example; the rollout gets no reward.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import cast

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
"""Maps each argument name that a reward function may declare to the value it receives.

The values are the example's question, the last reply, the example's answer, the turns (a list of
types.Turn), the rollout (types.Rollout) and the example's extra columns.
"""


def from_function(reward_names: str, rubric: Rubric, user_functions: Mapping[str, Callable[..., object]]) -> Rubric:
    """Return a rubric for task.reward that includes the user's functions as reward terms.

    Args:
        reward_names: Value of task.reward: names joined by +.
        rubric: Rubric for the names that are not in `user_functions`. It is replaced if all names
            are user functions; otherwise, the user functions are added to it.
        user_functions: User-defined reward functions, keyed by name.
    """
    names = [name for name in reward_names.split("+") if name in user_functions]
    if not names:
        return rubric
    parts = {name: RewardTerm(wrap_reward_function(name, user_functions[name])) for name in names}
    if names == reward_names.split("+"):
        return Rubric(terms=parts, solved_term=names[0])
    return Rubric(terms={**rubric.terms, **parts}, turn_terms=rubric.turn_terms, vetoes=rubric.vetoes, solved_term=rubric.solved_term)


def wrap_reward_function(name: str, function: Callable[..., object]) -> RewardFn:
    """Return a reward function that calls `function` with the arguments in its signature.

    Raises:
        ValueError: `function` is not a Python function, or requires an argument that is not in
            REWARD_ARGUMENTS.
    """
    require(
        inspect.isfunction(function) or inspect.ismethod(function), f"rewards[{name!r}]", function, "is not a function written in Python"
    )
    parameters = inspect.signature(function).parameters
    is_batched = "completions" in parameters
    collect_arguments = _batch_arguments(parameters) if is_batched else _named_arguments(name, parameters)

    async def reward(outcome: RewardInput) -> float | None:
        example = outcome.rollout.example_id
        try:
            given = collect_arguments(outcome)
        except KeyError as lacking:
            raise PermanentInfraError(f"reward {name} on {example}: the task's examples have no {lacking}") from lacking
        try:
            value = function(**given)
            if inspect.isawaitable(value):
                value = await value
            if is_batched:
                (value,) = cast("Sequence[object]", value)
        except InfraError:
            raise
        except Exception as error:  # user code may raise any exception, and a single reply must not end the run
            frames = traceback.extract_tb(error.__traceback__)
            place = [frame for frame in frames if frame.filename == inspect.getsourcefile(function)] or frames
            told = f"{type(error).__name__}: {error} ({place[-1].filename}:{place[-1].lineno})"
            raise PermanentInfraError(f"reward {name} on {example}: {told}") from error
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise PermanentInfraError(f"reward {name} on {example}: returned {value!r}; expected a finite number or None")
        return None if value is None else float(value)

    return reward


def _named_arguments(name: str, parameters: Mapping[str, inspect.Parameter]) -> Callable[[RewardInput], Mapping[str, object]]:
    """Return a function that collects the arguments that a reward function names.

    Raises:
        ValueError: The reward function requires another argument.
    """
    asked = [each for each in parameters.values() if each.name in REWARD_ARGUMENTS or each.default is inspect.Parameter.empty]
    for argument in asked:
        known = argument.name in REWARD_ARGUMENTS and argument.kind is not inspect.Parameter.POSITIONAL_ONLY
        remedy = f"allowed arguments are {', '.join(REWARD_ARGUMENTS)}; or completions and columns of the data, as in TRL"
        require(known, f"rewards[{name!r}]", f"({', '.join(map(str, asked))})", remedy)
    return lambda outcome: {argument.name: REWARD_ARGUMENTS[argument.name](outcome) for argument in asked}


def _batch_arguments(parameters: Mapping[str, inspect.Parameter]) -> Callable[[RewardInput], Mapping[str, object]]:
    """Return a function that collects the arguments of a reward function in the form of TRL.

    Each argument is a list with one entry: the prompt and the completion as lists of messages, and
    each column of the example. The reference answer is passed as `answer` and as `solution`.
    Arguments that are not in the function's signature are passed only to **kwargs.
    """
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def collect(outcome: RewardInput) -> Mapping[str, object]:
        payload = outcome.payload
        answer = payload.get("answer")
        columns = {"question": payload.get("question"), "answer": answer, "solution": answer, **payload.get("extra", {})}
        messages = {
            "prompts": [{"role": "user", "content": payload.get("question", "")}],
            "completions": [{"role": "assistant", "content": outcome.replies[-1]}],
        }
        given = {key: [value] for key, value in (columns | messages).items() if takes_all or key in parameters}
        for key, each in parameters.items():
            is_required = each.default is inspect.Parameter.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            if is_required and key not in given:
                raise KeyError(key)
        return given

    return collect
