"""What a run measures: metrics.jsonl, TensorBoard, W&B and trackio written together, and the spans that say where a step's time went."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.config import TrackioSettings, WandbSettings, require
from megatron_rl.io.bounded_files import read_text
from megatron_rl.io.jsonl import parse_number, read_lines, to_json_line, write_bytes_atomically
from megatron_rl.observe.event_file import EventFile
from megatron_rl.types import Rollout

METRICS_FILE = "metrics.jsonl"
MAX_METRICS_BYTES = 1 << 20
"""Limit of a line: a hundred times the size of a real one."""
MAX_ID_BYTES = 1000
PREDICTION_COLUMNS = ("step", "kind", "example", "sample", "reward", "end", "picture", "content")
"""Columns of W&B's table of rollouts: the first picture, and all that the policy said."""


class MetricsLog:
    """One line a step in metrics.jsonl, the same numbers in TensorBoard files and, if wandb.mode and trackio.mode say so, there.

    Only the main rank makes one. A log that starts at step k continues a metrics.jsonl of the steps before k (run/superseded_steps.py has
    moved the later ones); TensorBoard readers are told to purge steps >= k, and trackio's run is written anew.
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
        has_trackio = trackio_settings is not None and trackio_settings.mode == "local"
        self._trackio = _start_trackio(run_dir, trackio_settings, config, past=read_metrics(path)) if has_trackio else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step. metrics.jsonl is flushed to the disk before this returns: a checkpoint has no step whose line may still be lost.

        OSError: the file is not the one that was opened: the run folder was removed, or moved away.
        """
        if not os.path.samestat(self._path.stat(), os.fstat(self._lines.fileno())):
            raise FileExistsError(f"{self._path} is another run's: this one's folder was removed or moved")
        self._lines.write(to_json_line({"step": step, **metrics}) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._tensorboard.write(step, metrics)
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})
        if self._trackio is not None:
            self._trackio.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rollouts_by_kind: Mapping[str, Sequence[Rollout]], *, image_folder: Path) -> None:
        """Rollouts of a step by kind (best, worst), for W&B alone: a table, `predictions`. `image_folder` holds KEY.png of Image.key; one
        that is not there, because another node has it, is left out."""
        if self._wandb is None or not any(rollouts_by_kind.values()):
            return
        import wandb

        def row(kind: str, rollout: Rollout) -> list[object]:
            files = [image_folder / f"{image.key}.png" for image in rollout.images[:1]]
            first = next((wandb.Image(str(file)) for file in files if file.exists()), None)
            said = "\n".join(turn.text for turn in rollout.turns)
            return [step, kind, rollout.example_id, rollout.sample_index, rollout.reward, str(rollout.stop_reason), first, said]

        rows = [row(kind, rollout) for kind, rollouts in rollouts_by_kind.items() for rollout in rollouts]
        self._wandb.log({"step": step, "predictions": wandb.Table(columns=list(PREDICTION_COLUMNS), data=rows)})

    def close(self) -> None:
        """OSError: the last of a file could not be written; all are closed even so."""
        with ExitStack() as closing:
            for others in (self._trackio, self._wandb):
                if others is not None:
                    closing.callback(others.finish)
            closing.callback(self._tensorboard.close)
            closing.callback(self._lines.close)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl in order, each {"step": ..., name: value ...}; NaN and infinities are floats again.

    ValueError: a line has no step, or something that is no number.
    """
    steps = []
    for number, line in enumerate(read_lines(path, max_line_bytes=MAX_METRICS_BYTES), 1):
        try:
            if not isinstance(line, dict):
                raise ValueError(f"is a {type(line).__name__}, no step")
            steps.append({name: parse_number(value) for name, value in {"step": None, **line}.items()})
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return steps


def check_wandb(settings: WandbSettings) -> None:
    """ValueError where W&B would ask for a key that neither the environment, nor .netrc, nor its own settings hold. Asks no server."""
    if settings.mode != "online":
        return
    import wandb
    from wandb.sdk.lib.wbauth import authenticate_session

    try:
        known = authenticate_session(host=wandb.setup().settings.base_url, source="", prompt=False, update_session=False)
    except wandb.errors.AuthenticationError as error:
        raise ValueError(f"wandb.mode=online: {str(error).rstrip('.')}; run wandb login, or use offline") from error
    remedy = "no key: run wandb login, or set WANDB_API_KEY, or use offline (wandb sync sends it later)"
    require(known is not None, "wandb.mode", settings.mode, remedy)


def _start_wandb(run_dir: Path, settings: WandbSettings, config: dict[str, object]):  # noqa: ANN202 (wandb is imported only when used)
    """A W&B run whose id lives in the run folder, so that a resumed run continues it. Its x axis is our step: re-run steps overwrite."""
    import wandb

    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir / "wandb"))  # else the pictures of offline tables wait in the home folder
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_bytes_atomically(id_file, uuid.uuid4().hex[:8].encode("ascii"))
    run = wandb.init(
        mode=settings.mode, project=settings.project, name=run_dir.name, dir=str(run_dir), config=config,
        id=read_text(id_file, at_most=MAX_ID_BYTES), resume="allow" if settings.mode == "online" else None,
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    return run


def check_trackio(settings: TrackioSettings) -> None:
    """ValueError where trackio is asked for and not installed."""
    is_there = settings.mode == "disabled" or find_spec("trackio") is not None
    require(is_there, "trackio.mode", settings.mode, "the package is not installed: pip install trackio==0.43.0, or bash launch/install.sh")


def _start_trackio(run_dir: Path, settings: TrackioSettings, config: dict[str, object], *, past: list[dict[str, float]]):  # noqa: ANN202
    """A local trackio run (0.43.0) with the steps that the run has behind it. That of an earlier life, whose id lies in the run folder, is
    removed: trackio keeps every line that it was ever given for a step."""
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
    """Seconds by name, each second counted once: while an inner span is open, the clock of the outer one stands.

    Example: engine 0..5 s with a span environment 1..3 s inside, update 6..8 s, take() at 10 s gives
        time/engine 3, time/environment 2, time/update 2, time/unaccounted 3, time/total 10.
    For one thread; a span must not be left open across an await, because another coroutine would run inside it.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, on_span: Callable[[str], None] | None = None,
        trace: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`on_span` is told the name of every span that opens (a progress display, say); `trace` is entered with each (a trace)."""
        self._clock, self._on_span, self._trace = clock, on_span, trace
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._mark = self._last_collected = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
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
        """Credit seconds that were measured elsewhere and passed within the span that is open now: they are taken from that one."""
        self._add_to_span(name, seconds)
        if self._open:
            self._add_to_span(self._open[-1], -seconds)

    def collect(self) -> dict[str, float]:
        """The seconds since the last take as time/NAME, with time/total and time/unaccounted (in no span). May be called inside a span."""
        self._charge_open_span()
        total = self._mark - self._last_collected
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times |= {"time/unaccounted": total - sum(times.values()), "time/total": total}
        self._seconds, self._last_collected = {}, self._mark
        return times

    def _charge_open_span(self) -> None:
        """Credit the time since the last change to the span that was open."""
        now = self._clock()
        if self._open:
            self._add_to_span(self._open[-1], now - self._mark)
        self._mark = now

    def _add_to_span(self, name: str, seconds: float) -> None:
        assert name not in ("total", "outside"), f"{name} is not a name for a span"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
