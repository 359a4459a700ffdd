"""A NaN reward in a real run of two processes ends the run before a weight update uses it.

The step's rollouts are saved.
"""

import math
import re
from pathlib import Path

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from tests.conftest import SUPPORT
from tests.support import fork_server


def test_the_rollouts_of_the_step_are_left_behind(random_model: Path, tmp_path: Path) -> None:
    """Both ranks print the same error, which names the rollout and the file with the step's four
    rollouts. No metrics of this step and no final model are written.
    """
    run = tmp_path / "run"
    result = fork_server.run_world(2, SUPPORT / "nan_reward_run.py", random_model, run, timeout_s=240)
    line = r"^said: (step (\d+), task=mine: blue#0 has the reward nan; .*; the step's rollouts are saved in (\S+); .*)$"
    said = re.findall(line, result.stdout, re.MULTILINE)
    assert result.returncode == 1 and said, result.stdout
    (_, step, path), *others = said
    assert Path(path) == run / "not_finite" / f"step_00000{step}.jsonl" and all(other == said[0] for other in others)
    rollouts = [entry.rollout for entry in read_recorded(Path(path))]
    assert [(rollout.group, rollout.sample_index) for rollout in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rollout.example_id for rollout in rollouts if math.isnan(rollout.reward)] == ["blue", "blue"]
    for rollout in rollouts:
        (context,) = rollout.sequences
        assert [image.pil.size for image in context.images] == [(112, 112), (168, 84)] and rollout.oldest_version == int(step)
        assert min(context.rollout_logprobs) < 0 and len(rollout.turns) == 3
    assert len(read_metrics(run / "metrics.jsonl")) == int(step) and not (run / "final").exists()
