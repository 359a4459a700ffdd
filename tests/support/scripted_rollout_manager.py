"""A rollout manager without vLLM and without a process group.

Its engine returns scripted responses, and its gather function returns its input.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rewards.rubric import Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.manager import RankCollectives, RolloutManager, RunCallbacks
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.rollout.task import Env, Step
from megatron_rl.types import Example, Image, Message, Rollout

EXAMPLES = [Example(f"{number}", {}) for number in range(10)]
EPISODE = EpisodeSettings(temperature=0.9, max_turns=2, max_new_tokens=3, max_sequence_tokens=200, max_images=0, seed=5)


@dataclass
class ScriptedEngine:
    """An engine whose responses have the maximum length and a token that depends on the seed.

    The first `num_faults` requests of every seed fail.
    """

    num_faults: int = 0
    fault_type: type[InfraError] = InfraError
    is_leader: bool = True
    log: list[str] = field(default_factory=list)
    requests: list[SamplingSettings] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    weight_version: int = 7
    busy_s: float = 1.5

    def run(self, main: Coroutine[object, object, object]) -> object:
        if self.is_leader:
            return asyncio.run(main)
        return main.close()

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.requests.append(sampling)
        self.attempts[sampling.seed] += 1
        if self.attempts[sampling.seed] <= self.num_faults:
            raise self.fault_type("the engine is down")
        num = sampling.max_tokens
        return Completion([65 + sampling.seed % 9] * num, [-0.5] * num, is_stopped=False, weight_versions=[self.weight_version] * num)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        self.log.append(f"engine loads {','.join(name for name, _ in tensors)} as {version}")

    def sleep(self) -> None:
        self.log.append("engine sleeps")

    def wake(self) -> None:
        self.log.append("engine wakes")

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.log.append("engine closes")


@dataclass
class DelayedEngine(ScriptedEngine):
    """An engine that takes `reply_s` seconds per response.

    All requests from number `fails_from` on fail permanently.
    """

    reply_s: float = 0.0
    fails_from: int = 10**6
    in_flight: int = 0
    max_in_flight: int = 0

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        if len(self.requests) >= self.fails_from:
            raise PermanentInfraError("the engine has failed")
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        await asyncio.sleep(self.reply_s)
        self.in_flight -= 1
        return await super().generate(token_ids, images, sampling)


@dataclass
class FakeTrainer:
    log: list[str]

    def sleep(self) -> None:
        self.log.append("trainer sleeps")

    def wake(self) -> None:
        self.log.append("trainer wakes")


@dataclass
class ChatEnv(Env):
    """An environment that never ends an episode itself and records the seeds of its resets in its
    task.
    """

    resets: list[tuple[str, int]]
    example: Example

    async def reset(self, seed: int) -> list[Message]:
        self.resets.append((self.example.id, seed))
        return [{"role": "user", "content": self.example.id}]

    async def step(self, text: str) -> Step:
        return Step(messages=[{"role": "user", "content": "Go on."}], reward=1.0, done=False)

    async def close(self) -> None:
        """There is nothing to close."""


@dataclass
class ChatTask:
    resets: list[tuple[str, int]] = field(default_factory=list)
    name: str = "talk"
    stop: Sequence[str] = ()
    rubric: Rubric = field(default_factory=lambda: Rubric(turn_terms={"reward": TurnRewardTerm(environment_rewards)}))

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def examples(self, split: str) -> list[Example]:
        return EXAMPLES if split == "train" else EXAMPLES[:2]

    def env(self, example: Example) -> ChatEnv:
        return ChatEnv(self.resets, example)

    def success(self, rollout: Rollout) -> bool:
        return True

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {}


def make_rollout_manager(
    renderer: Renderer, engine: ScriptedEngine | None = None, *, max_rounds: int = 9, **changes: object
) -> RolloutManager:
    engine = engine or ScriptedEngine()
    rounds = GenerationSettings(num_prompts=2, group_size=3, max_num_gen_batches=max_rounds)
    return RolloutManager(ChatTask(), engine=engine, renderer=renderer, **manager_arguments(engine, rounds, changes))


def manager_arguments(engine: ScriptedEngine, rounds: GenerationSettings, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a RolloutManager, in which each change is put into its record."""
    left = dict(changes)

    def pop_fields(record: type) -> dict[str, object]:
        return {field.name: left.pop(field.name) for field in fields(record) if field.name in left}

    return {
        "trainer": FakeTrainer(engine.log), "episode_settings": EPISODE, "collectives": RankCollectives(**pop_fields(RankCollectives)),
        "callbacks": RunCallbacks(**pop_fields(RunCallbacks)),
        "generation_settings": replace(rounds, **pop_fields(GenerationSettings)), **left,
    }  # fmt: skip


def strip_timings(rollouts: list[Rollout]) -> list[tuple]:
    """Return the contents of the rollouts without their timings."""
    turns = [[replace(turn, generation_s=0.0, env_s=0.0) for turn in rollout.turns] for rollout in rollouts]
    parts = [(r.example_id, r.group, r.sample_index, r.status, r.stop_reason, r.reward, r.reward_terms, r.sequences) for r in rollouts]
    return list(zip(parts, turns, strict=True))
