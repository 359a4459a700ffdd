"""Metric logs of a run (metrics.jsonl, TensorBoard, W&B, trackio), and the step timer."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from megatron_rl.config import TrackioSettings, WandbSettings, require
from megatron_rl.io.bounded_files import read_text
from megatron_rl.io.jsonl import parse_number, read_lines, to_json_line, write_bytes_atomically
from megatron_rl.observe.event_file import EventFile
from megatron_rl.types import Rollout

METRICS_FILE = "metrics.jsonl"
MAX_METRICS_BYTES = 1 << 20
"""Maximum size in bytes of a line in metrics.jsonl: a hundred times the size of a typical line."""
MAX_ID_BYTES = 1000
PREDICTION_COLUMNS = ("step", "kind", "example", "sample", "reward", "end", "picture", "content")
"""Columns of the rollout table in W&B.

`picture` is the first image, and `content` is the text of all turns.
"""


class MetricsLog:
    """Log that writes one line per step to metrics.jsonl and the same metrics to TensorBoard files.

    The metrics also go to W&B and trackio if wandb.mode and trackio.mode enable them. Only the main
    rank creates a log. Before a resumed run creates a log that starts at step k,
    run/superseded_steps.py moves the metrics of steps >= k from metrics.jsonl to RUN/superseded.
    TensorBoard readers discard earlier data for these steps, and the trackio run is rewritten from
    its start.
    """

    def __init__(
        self, run_dir: Path, wandb_settings: WandbSettings, config: dict[str, object], *,
        trackio_settings: TrackioSettings | None = None, start_step: int = 0,
    ) -> None:  # fmt: skip
        run_dir.mkdir(parents=True, exist_ok=True)
        path = self._path = run_dir / METRICS_FILE
        self._lines = path.open("a", encoding="ascii")
        self._tensorboard = EventFile(run_dir / "tensorboard", start_step=start_step)
        self._wandb = None if wandb_settings.mode == "disabled" else _start_wandb(run_dir, wandb_settings, config)
        self._trackio = None
        if trackio_settings is not None and trackio_settings.mode == "local":
            self._trackio = _start_trackio(run_dir, trackio_settings, config, past=read_metrics(path))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step.

        The file metrics.jsonl is flushed to disk before this method returns. If a checkpoint is
        written afterwards, metrics.jsonl therefore contains all steps of the checkpoint.

        Raises:
            OSError: metrics.jsonl is not the file that was opened, because the run directory was
                removed or moved.
        """
        if not os.path.samestat(self._path.stat(), os.fstat(self._lines.fileno())):
            raise FileExistsError(f"{self._path} belongs to another run: the directory of this run was removed or moved")
        self._lines.write(to_json_line({"step": step, **metrics}) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._tensorboard.write(step, metrics)
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})
        if self._trackio is not None:
            self._trackio.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rollouts_by_kind: Mapping[str, Sequence[Rollout]], *, image_folder: Path) -> None:
        """Log rollouts of a step to W&B as the table `predictions`.

        `rollouts_by_kind` maps a kind (best or worst) to its rollouts. Rollouts are not logged to
        TensorBoard, trackio or metrics.jsonl. `image_folder` contains KEY.png for each Image.key;
        images that are stored on other nodes are omitted.
        """
        if self._wandb is None or not any(rollouts_by_kind.values()):
            return
        import wandb

        def row(kind: str, rollout: Rollout) -> list[Any]:
            files = [image_folder / f"{image.key}.png" for image in rollout.images[:1]]
            first = next((wandb.Image(str(file)) for file in files if file.exists()), None)
            said = "\n".join(turn.text for turn in rollout.turns)
            return [step, kind, rollout.example_id, rollout.sample_index, rollout.reward, str(rollout.stop_reason), first, said]

        rows: list[Any] = [row(kind, rollout) for kind, rollouts in rollouts_by_kind.items() for rollout in rollouts]
        self._wandb.log({"step": step, "predictions": wandb.Table(columns=list(PREDICTION_COLUMNS), data=rows)})

    def close(self) -> None:
        """Close all logs.

        Raises:
            OSError: buffered data could not be flushed to a file. All files are closed
                nevertheless.
        """
        with ExitStack() as closing:
            for others in (self._trackio, self._wandb):
                if others is not None:
                    closing.callback(others.finish)
            closing.callback(self._tensorboard.close)
            closing.callback(self._lines.close)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the steps in a metrics.jsonl in order, each as {"step": ..., name: value, ...}.

    NaN and infinities are restored as floats.

    Raises:
        ValueError: a line has no step, or has a value that is not a number.
    """
    steps = []
    for number, line in enumerate(read_lines(path, max_line_bytes=MAX_METRICS_BYTES), 1):
        try:
            if not isinstance(line, dict):
                raise ValueError(f"must be the metrics of a step, not {type(line).__name__}")
            steps.append({name: parse_number(value) for name, value in {"step": None, **line}.items()})
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return steps


def check_wandb(settings: WandbSettings) -> None:
    """Raise ValueError if W&B would prompt for an API key.

    The key is looked up in the environment, in .netrc and in W&B's own settings. No server is
    contacted.
    """
    if settings.mode != "online":
        return
    import wandb
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib.wbauth import authenticate_session

    try:
        known = authenticate_session(host=wandb.setup().settings.base_url, source="", prompt=False, update_session=False)
    except AuthenticationError as error:
        raise ValueError(f"wandb.mode=online: {str(error).rstrip('.')}; run wandb login, or use wandb.mode=offline") from error
    remedy = "no API key: run wandb login, or set WANDB_API_KEY, or use offline (wandb sync uploads the run later)"
    require(known is not None, "wandb.mode", settings.mode, remedy)


def _start_wandb(run_dir: Path, settings: WandbSettings, config: dict[str, object]):  # noqa: ANN202 (wandb is imported only when used)
    """Start a W&B run with an id stored in the run directory, so a resumed run continues it.

    The x axis is the training step, so repeated steps overwrite earlier data.
    """
    import wandb

    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir / "wandb"))  # otherwise images of offline tables go to the home folder
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_bytes_atomically(id_file, uuid.uuid4().hex[:8].encode("ascii"))
    run = wandb.init(
        mode=cast(Literal["offline", "online"], settings.mode), project=settings.project, name=run_dir.name, dir=str(run_dir),
        config=config, id=read_text(id_file, at_most=MAX_ID_BYTES), resume="allow" if settings.mode == "online" else None,
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    return run


def check_trackio(settings: TrackioSettings) -> None:
    """Raise ValueError if trackio is enabled but not installed."""
    is_there = settings.mode == "disabled" or find_spec("trackio") is not None
    require(is_there, "trackio.mode", settings.mode, "the package is not installed: pip install trackio==0.43.0, or bash launch/install.sh")


def _start_trackio(run_dir: Path, settings: TrackioSettings, config: dict[str, object], *, past: list[dict[str, float]]):  # noqa: ANN202
    """Start a local trackio run and log all previous steps to it.

    The trackio run of an earlier attempt is deleted, because trackio (0.43.0) does not replace the
    data of a step that is logged again. The earlier run is identified by the id in the run
    directory.
    """
    import trackio

    run = trackio.init(project=settings.project, name=run_dir.name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    id_file = run_dir / "trackio_id"
    if id_file.exists():
        earlier = read_text(id_file, at_most=MAX_ID_BYTES)
        for each in trackio.Api().runs(settings.project):
            if each.id == earlier:
                each.delete()
    write_bytes_atomically(id_file, run.id.encode("ascii"))
    for line in past:
        run.log({name: value for name, value in line.items() if name != "step"}, step=int(line["step"]))
    return run


class StepTimer:
    """Measures the seconds spent in spans, keyed by span name.

    An inner span pauses the outer span, so each second is counted once.

    Example: a span "engine" is open from 0 to 5 s, and within it a span "environment" from 1 to 3
    s. A span "update" is open from 6 to 8 s. At 10 s, collect() returns time/engine 3,
    time/environment 2, time/update 2, time/unaccounted 3 and time/total 10.

    The timer is for a single thread. A span must not stay open across an await, because another
    coroutine would run inside the span.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, on_span: Callable[[str], None] | None = None,
        trace: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        """Create a timer.

        Args:
            clock: returns the current time in seconds.
            on_span: called with the name of every span that opens, for example by a progress
                display.
            trace: returns a context manager that is entered for each span.
        """
        self._clock, self._on_span, self._trace = clock, on_span, trace
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._mark = self._last_collected = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the enclosed block as a span with this name."""
        self._charge_open_span()
        self._open.append(name)
        if self._on_span is not None:
            self._on_span(name)
        try:
            with self._trace(name):
                yield
        finally:
            self._charge_open_span()
            self._open.pop()

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add externally measured seconds to the span `name`.

        The seconds are subtracted from the currently open span, so they are not counted twice.
        """
        self._add_to_span(name, seconds)
        if self._open:
            self._add_to_span(self._open[-1], -seconds)

    def collect(self) -> dict[str, float]:
        """Return the seconds since the last call as time/NAME, time/total and time/unaccounted.

        The metric time/unaccounted is the time outside of all spans. The method may be called
        inside a span.
        """
        self._charge_open_span()
        total = self._mark - self._last_collected
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times |= {"time/unaccounted": total - sum(times.values()), "time/total": total}
        self._seconds, self._last_collected = {}, self._mark
        return times

    def _charge_open_span(self) -> None:
        """Add the time since the last span change to the open span."""
        now = self._clock()
        if self._open:
            self._add_to_span(self._open[-1], now - self._mark)
        self._mark = now

    def _add_to_span(self, name: str, seconds: float) -> None:
        assert name not in ("total", "unaccounted"), f"{name} is a reserved span name"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
