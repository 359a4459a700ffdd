"""Base of the tasks with questions from the user's files: data, judge and benchmark metrics."""

from collections.abc import Sequence

from megatron_rl.config import TaskSettings
from megatron_rl.data.benchmarks.catalog import compute_benchmark_metrics, load_benchmark_questions
from megatron_rl.rewards.judge import make_judge
from megatron_rl.rollout.task import Task
from megatron_rl.types import Example, Rollout


class QuestionTask(Task):
    """Task with questions from task.data and an optional judge (task.judge)."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.judge = make_judge(settings.judge)
        self.reads_videos = False
        """True if questions may contain videos."""
        self._splits: dict[str, Sequence[Example]] = {}

    async def start(self) -> None:
        """Start the judge, if one is configured."""
        if self.judge is not None:
            await self.judge.start()

    async def close(self) -> None:
        """Close the judge, if one is configured."""
        if self.judge is not None:
            await self.judge.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Return the questions of a split. The first call validates every row.

        Raises:
            ValueError: A row is invalid; the message names the first invalid row.
        """
        if split not in self._splits:
            self._splits[split] = load_benchmark_questions(self.settings.data, split, videos=self.reads_videos)
        return self._splits[split]

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the benchmark's metrics if `task.data.benchmark` is set."""
        return compute_benchmark_metrics(self.settings.data.benchmark, examples, rollouts)
