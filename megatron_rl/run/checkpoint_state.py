"""State of a run in its checkpoints, apart from tensors: run/state.json with its own digest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from pydantic import TypeAdapter, ValidationError

from megatron_rl.io.jsonl import read_json, write_bytes_atomically
from megatron_rl.run.record import History
from megatron_rl.weights.formats.digests import MAX_STATE_BYTES, STATE, check_records

_OWN_DIGEST = "sha256"
"""Key in run/state.json of the digest of all its other values."""


@dataclass(slots=True, frozen=True, kw_only=True)
class InputDigests:
    """Digests of the inputs that a resumed run reads again."""

    model: dict[str, str] = field(default_factory=dict)
    """Digests of the files in model.path, by name (weights/formats/model_digests.py)."""
    data: dict[str, str] = field(default_factory=dict)
    """Digests of the files of task.data.train, .eval and .demonstrations, by setting
    (data/data_digests.py).
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class CheckpointState:
    """State of a run after `step` steps, apart from its policy; without arguments, of a new run."""

    step: Annotated[int, Ge(0)] = 0
    history: History = field(default_factory=History)
    success: float | None = None
    """Greedy success of the evaluation after this step, if there was one."""
    settings: dict = field(default_factory=dict)
    inputs: InputDigests = field(default_factory=InputDigests)
    files: dict[str, dict[str, int | str]] = field(default_factory=dict)
    """Size and digest of every other file of the checkpoint, by relative name
    (weights/formats/digests.py).
    """


_STATE: TypeAdapter[CheckpointState] = TypeAdapter(CheckpointState)


def read_state(checkpoint: Path) -> CheckpointState:
    """Return the contents of a checkpoint's run/state.json.

    Raises:
        ValueError: The file is missing or damaged.
    """
    path = checkpoint / STATE
    try:
        read = read_json(path, at_most=MAX_STATE_BYTES)
        expected, found = read.pop(_OWN_DIGEST), _digest_of(read)
        if found != expected:
            raise ValueError(f"has the SHA-256 {found}, not {expected}")
        check_records(read["files"])
        state = CheckpointState(**{**read, "history": History(**read["history"]), "inputs": InputDigests(**read["inputs"])})
        _STATE.validate_json(json.dumps(read), strict=True)
        return state
    except FileNotFoundError as error:
        raise ValueError(f"{checkpoint}: damaged: {STATE} is missing") from error
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{checkpoint}: damaged: {STATE} cannot be read ({'.'.join(map(str, wrong['loc']))}: {wrong['msg']})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{checkpoint}: damaged: {STATE} cannot be read ({error})") from error


def write_state(path: Path, values: Mapping[str, object]) -> None:
    """Write run/state.json atomically, with a digest of `values`."""
    write_bytes_atomically(path, json.dumps({_OWN_DIGEST: _digest_of(values), **values}, indent=1).encode())


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
