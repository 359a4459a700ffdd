"""One engine generates, or one rank writes, for longer than parallel.timeout_s. This is no error
until parallel.straggler_timeout_s has passed.
"""

from pathlib import Path

from tests.conftest import SUPPORT
from tests.support import fork_server


def test_who_takes_longer_is_waited_for(tmp_path: Path) -> None:
    """With a straggler timeout of 60 s, both ranks finish and the checkpoint is complete."""
    done = fork_server.run_world(2, SUPPORT / "straggler_world.py", tmp_path, 60, timeout_s=100)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in tmp_path.glob("through_*")} == {"through_0", "through_1"}
    assert (tmp_path / "checkpoints" / "step_00000001" / "run" / "state.json").exists()


def test_but_not_for_ever(tmp_path: Path) -> None:
    """With a straggler timeout of 2 s, the run ends with an error that names rank 1."""
    done = fork_server.run_world(2, SUPPORT / "straggler_world.py", tmp_path, 2, timeout_s=100)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and line.startswith("error: parallel.straggler_timeout_s=2: a collective waited longer; rank 1 "), (
        done.stdout
    )
    assert not list(tmp_path.glob("through_*"))
