"""Reads and writes run/state.json, the part of a checkpoint that contains no tensors."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from pydantic import TypeAdapter, ValidationError

from megatron_rl.io.jsonl import read_json, write_bytes_atomically
from megatron_rl.run.history import History
from megatron_rl.weights.formats.digests import MAX_STATE_BYTES, STATE, check_records

_OWN_DIGEST = "sha256"
"""Key in run/state.json for the digest of all other values in the file."""


@dataclass(slots=True, frozen=True, kw_only=True)
class InputDigests:
    """Digests of the model and data files, which a resumed run checks for changes."""

    model: dict[str, str] = field(default_factory=dict)
    """Digests of the files in model.path, keyed by file name (weights/formats/model_digests.py)."""
    data: dict[str, str] = field(default_factory=dict)
    """Digests of the files in task.data.train, task.data.eval and task.data.demonstrations, keyed
    by setting (data/data_digests.py).
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class CheckpointState:
    """State of a run after `step` steps, without the weights.

    The default values describe a new run.
    """

    step: Annotated[int, Ge(0)] = 0
    history: History = field(default_factory=History)
    success: float | None = None
    """Success rate of greedy decoding in the evaluation after this step; None without an
    evaluation.
    """
    settings: dict = field(default_factory=dict)
    inputs: InputDigests = field(default_factory=InputDigests)
    files: dict[str, dict[str, int | str]] = field(default_factory=dict)
    """Size and digest of every other file in the checkpoint, keyed by relative path
    (weights/formats/digests.py).
    """


_STATE: TypeAdapter[CheckpointState] = TypeAdapter(CheckpointState)


def read_state(checkpoint: Path) -> CheckpointState:
    """Read, verify and return the contents of a checkpoint's run/state.json.

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
    """Write run/state.json atomically, with the digest of `values`."""
    write_bytes_atomically(path, json.dumps({_OWN_DIGEST: _digest_of(values), **values}, indent=1).encode())


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
