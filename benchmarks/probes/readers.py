"""Targets of attacks: this project's file readers, and common readers without a defense."""

import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import yaml
from jinja2 import Environment
from PIL import Image
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.data.clips import StoredVideo
from megatron_rl.data.images import StoredImage
from megatron_rl.observe.recorder import make_image_loader
from megatron_rl.observe.rollout_store import read_rollouts
from megatron_rl.observe.viewer.store import RunFolder
from megatron_rl.observe.viewer.token_decoder import TokenDecoder
from megatron_rl.rollout import processor
from megatron_rl.run.checkpoints import CheckpointState, read_state
from megatron_rl.weights.formats.digests import compute_sha256, find_difference
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.formats.torch_dist_metadata import read_metadata


def plain_yaml(path: Path) -> object:
    """Read YAML with yaml.safe_load."""
    return yaml.safe_load(path.read_text())


def plain_lines(path: Path) -> object:
    """Read a whole JSON-lines file into memory and parse each line."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def plain_picture(path: Path) -> object:
    """Read an image with Pillow."""
    return Image.open(path).convert("RGB").copy()


def stored_picture(path: Path) -> object:
    """Read a question's image with this project's reader."""
    return StoredImage(path, "row 1").open()


def size_of_picture(path: Path) -> object:
    """Read the size of a question's image with this project's reader."""
    return StoredImage(path, "row 1").size()


def loaded_picture(path: Path) -> object:
    """Read a rollout's image with this project's loader."""
    return make_image_loader(path.parent.parent)(f"images/{path.name}")


def shown_picture(path: Path) -> bytes | None:
    """Return a rollout's image as the viewer would serve it."""
    return RunFolder(path.parents[2]).read_image(path.stem)


def metrics_of_folder(path: Path) -> object:
    """Return a run's metrics as read by the viewer."""
    return RunFolder(path.parent).metrics()


def decoded(path: Path) -> object:
    """Decode a token with the viewer's decoder process."""
    return TokenDecoder(path, timeout_s=8.0).decode([[0]])


def decoded_here(path: Path) -> object:
    """Decode a token in this process."""
    return Tokenizer.from_file(str(path)).decode([0])


def plain_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file without validating its header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    places = {name: entry["data_offsets"] for name, entry in json.loads(content[8 : 8 + length]).items()}
    return {name: np.frombuffer(content[8 + length :][first:last], np.float32) for name, (first, last) in places.items()}


def stored_safetensors(path: Path) -> dict[str, Any]:
    """Read a safetensors file with this project's reader."""
    folder = HfTensors(path.parent, key="model.path")
    return {name: folder.read(name) for name in folder.specs}


def plain_pickle(path: Path) -> object:
    """Load a file with pickle."""
    return pickle.loads(path.read_bytes())


def metadata(path: Path) -> object:
    """Read a checkpoint's metadata with this project's reader."""
    return read_metadata(path.parent, key="model.path")


def by_digest(folder: Path) -> str:
    """Return the first file that differs from its record, checked by this project's digests."""
    state = read_state(folder)
    return find_difference(folder, state.files, state.files)


def by_size(folder: Path) -> str:
    """Return the first file that differs from its record, checked only by file sizes."""
    files = json.loads((folder / "run" / "state.json").read_text())["files"]
    return next((name for name, each in files.items() if (folder / name).stat().st_size != each["bytes"]), "")


def by_state(folder: Path) -> int:
    """Return a checkpoint's step as read by this project's reader."""
    return read_state(folder).step


def by_plain_state(folder: Path) -> int:
    """Return a checkpoint's step without validating the checkpoint state."""
    return CheckpointState(
        **json.loads((folder / "run" / "state.json").read_text(), object_hook=lambda read: {k: v for k, v in read.items() if k != "sha256"})
    ).step


def plain_digest(folder: Path) -> str:
    """Return the first recorded file with a wrong digest, even outside the checkpoint."""
    files = json.loads((folder / "run" / "state.json").read_text())["files"]
    return next((name for name, each in files.items() if compute_sha256(folder / name) != each["sha256"]), "")


def unmoved(words: str) -> str:
    """Return the text unchanged."""
    return words


def as_a_page(form: str) -> str:
    """Render a template with Jinja, without a sandbox."""
    return Environment().from_string(form).render(messages=[])


def inspected(form: str) -> str:
    """Validate a chat template with this project's validator, then render it."""
    with patch.object(processor, "TEMPLATE_CPU_S", 2):
        processor.require_bounded_template(form, "MODEL")
    return rendered(form)


def rendered(form: str) -> str:
    """Render a chat template with transformers."""
    return render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=form, add_generation_prompt=True)[0][0]


def plain_end(path: Path) -> bytes:
    """Read a whole file and return its last bytes."""
    return path.read_bytes()[-100:]


def plain_size(path: Path) -> object:
    """Open an image with Pillow and return its size."""
    return Image.open(path).size


def stored_clip(path: Path) -> bytes:
    """Read a question's video with this project's reader."""
    return StoredVideo(path, "row 1").read()


def stored_rollouts(path: Path) -> object:
    """Read a step's rollouts with this project's reader."""
    return read_rollouts(path, with_images=False)


def plain_rollouts(path: Path) -> object:
    """Read a step's rollouts with pyarrow."""
    return pq.read_table(path).to_pylist()
