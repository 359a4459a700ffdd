"""Malicious weight files and model folders: each is rejected with a one-line error within 100 MB
and 10 s.

Some files expand to much more than their size; others lead out of the folder. Control tests run the
underlying library on the same files.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.models.hf_config import read_spec
from megatron_rl.weights.formats.safetensors_folder import INDEX_FILE, HfTensors
from megatron_rl.weights.formats.tensor_files import copy_companions
from megatron_rl.weights.formats.torch_dist_metadata import chunks_cover_tensor, make_shape, read_metadata
from tests.support import bombs
from tests.support.reader_cost import ReadResult, is_cheap, measure_reads


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the path of every malicious file or folder by its name."""
    home = tmp_path_factory.mktemp("bombs")
    found = {name: home / f"{name}.pt" for name in bombs.TORCH}
    for name, path in found.items():
        bombs.TORCH[name](path)
    for name in ("memo", "keyed", "chunks", "names", "deep index", "deep config"):
        found[name] = home / name
        found[name].mkdir()
    (found["memo"] / ".metadata").write_bytes(bombs.MEMO_PICKLE)
    (found["keyed"] / ".metadata").write_bytes(bombs.NESTED_KEY_PICKLE)
    bombs.metadata_of_chunks(found["chunks"] / ".metadata")
    bombs.safetensors_of_names(found["names"] / "model.safetensors")
    bombs.json_of_depth(found["deep index"] / INDEX_FILE, bombs.DEEP)
    bombs.json_of_depth(found["deep config"] / "config.json")
    return found


READERS = {
    **dict.fromkeys(bombs.TORCH, "torch"), "memo": "metadata", "keyed": "metadata", "chunks": "metadata", "names": "hf", "deep index": "hf",
    "deep config": "spec",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(places: dict[str, Path]) -> dict[str, ReadResult | None]:
    """Return the cost of reading each malicious file, all measured in one process."""
    return dict(
        zip(READERS, measure_reads(("spec", places["names"]), *((READERS[name], places[name]) for name in READERS))[1:], strict=True)
    )


@pytest.mark.parametrize("name", READERS)
def test_it_takes_what_its_size_allows(name: str, found: dict[str, ReadResult | None]) -> None:
    """Reading a malicious file is cheap.

    `strides`, `chunks` and `deep index` are security.md 25.
    """
    assert is_cheap(found[name])


@pytest.mark.parametrize(
    ("name", "reader", "file"),
    [("strides", "by torch", ""), ("deflated", "by torch", ""), ("bytearray", "by torch", ""), ("copies", "by torch", ""),
     ("memo", "by pickle", ".metadata"), ("keyed", "by pickle", ".metadata"), ("names", "by json", "model.safetensors")],
)  # fmt: skip
def test_the_libraries_by_themselves_take_more(name: str, reader: str, file: str, places: dict[str, Path]) -> None:
    """Control: the libraries alone are killed by a signal, take more than 200 MB, or fail to
    allocate."""
    (control,) = measure_reads((reader, places[name] / file if file else places[name]))
    assert control is None or control.mb > 200 or "alloc" in control.error, control


def test_chunks_that_tile_and_those_that_do_not() -> None:
    """`chunks_cover_tensor` equals a count per tensor entry, on randomly cut boxes.

    In a third of the trials a box is duplicated, and in another third one is removed.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk

    draw = torch.Generator().manual_seed(0)
    for trial in range(300):
        whole = torch.Size(torch.randint(1, 6, (trial % 4,), generator=draw).tolist())
        boxes = [((0,) * len(whole), tuple(whole))]
        for _ in range(4 * bool(whole)):
            offsets, sizes = boxes.pop(int(torch.randint(len(boxes), (), generator=draw)))
            dim = int(torch.randint(len(whole), (), generator=draw))
            cut = int(torch.randint(sizes[dim] + 1, (), generator=draw))
            low, high = list(sizes), list(sizes)
            low[dim], high[dim] = cut, sizes[dim] - cut
            moved = [offset + cut * (at == dim) for at, offset in enumerate(offsets)]
            boxes += [(offsets, tuple(low)), (tuple(moved), tuple(high))]
        if trial % 3 == 1:
            boxes.append(boxes[trial % len(boxes)])
        if trial % 3 == 2:
            boxes.pop(trial % len(boxes))
        count = torch.zeros(whole)
        for offsets, sizes in boxes:
            count[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
        chunks = [Chunk(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        assert chunks_cover_tensor(whole, chunks) == bool((count == 1).all()), (whole, boxes)


def test_a_state_is_given_to_nothing_but_records(tmp_path: Path) -> None:
    """Pickle's BUILD sets state on records only.

    BUILD with (None, slots) sets attributes; on a function of this project it would change the
    process. As a control, plain pickle does so.
    """
    slots = b"(N}X\x0c\0\0\0__defaults__)stb."
    (tmp_path / ".metadata").write_bytes(b"\x80\x02ctorch\nSize\n" + slots)
    with pytest.raises(ValueError, match="sets the state of an object of type function"):
        read_metadata(tmp_path, key="--checkpoint")
    assert make_shape.__defaults__ == ((),)
    pickle.loads(b"\x80\x02cmegatron_rl.weights.formats.torch_dist_metadata\nmake_shape\n" + slots)
    assert make_shape.__defaults__ == ()
    make_shape.__defaults__ = ((),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.mark.parametrize("file", ["../other.safetensors", "/dev/zero", "sub/model.safetensors", "..", "."])
def test_an_index_names_files_of_its_folder(file: str, folder: Path) -> None:
    """An index may only name files of its folder. security.md 25: the named file was opened before
    it was rejected."""
    shutil.copy(folder / "model.safetensors", folder.parent / "other.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ValueError, match="which is not a file name"):
        HfTensors(folder)


def test_a_pipe_is_no_file(folder: Path) -> None:
    """A named pipe is not treated as a weight file.

    Opening it would block until a writer appears; the control times out after one second.
    """
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ValueError, match="no \\*.safetensors file"):
        HfTensors(folder)
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", f"open({str(folder / 'model.safetensors')!r})"], timeout=1, check=False)


def test_links_out_of_a_model_are_refused(folder: Path) -> None:
    """A link that leads out of a model folder is rejected, both on copying and on opening the
    weights. security.md 17: tokenizer.json -> /etc/shadow was copied into a folder to be
    published."""
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    for reads in (lambda: copy_companions(folder, folder.parent / "out"), lambda: HfTensors(folder)):
        with pytest.raises(ValueError, match="tokenizer.json: is a link to /etc/hostname, outside its folder; replace"):
            reads()
    assert not list((folder.parent / "out").iterdir())


def test_links_within_a_model_and_to_the_hubs_blobs_are_copied(tmp_path: Path) -> None:
    """Links within a model folder or to the Hugging Face cache's blobs are copied as files.

    Large unrelated files are not copied.
    """
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "models--org--name" / "blobs"
    for part in (snapshot, blobs):
        part.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "tokenizer.json").symlink_to("config.json")
    with (snapshot / "notes.txt").open("wb") as notes:
        os.truncate(notes.fileno(), 200 << 30)
    (snapshot / "sub").mkdir()
    (snapshot / "sub" / "config.json").symlink_to("../../../blobs/1")
    copy_companions(snapshot / "sub", tmp_path / "sub")
    assert (tmp_path / "sub" / "config.json").read_text() == "{}"
    copy_companions(snapshot, tmp_path / "out")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"config.json": "{}", "tokenizer.json": "{}"}


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    """Python files in a model folder are never executed.

    A config.json of a known model type may still name Python files in auto_map.
    """
    mark = tmp_path / "ran"
    (tmp_path / "hub.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass C: pass\n")
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "hub.C", "AutoProcessor": "hub.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has model_type stranger"):
        read_spec(tmp_path)
    from transformers import AutoProcessor

    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "C", "auto_map": {"AutoProcessor": "hub.C"}}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoProcessor.from_pretrained(tmp_path, trust_remote_code=False)
    assert not mark.exists()


DEEP = '{"a":' + "[" * bombs.DEEP


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", DEEP), ("tokenizer.json", "[1]"), ("tokenizer_config.json", DEEP), ("tokenizer.json", "{")],
)
def test_a_tokenizer_of_another_form_is_one_line(file: str, content: str, random_model: Path, tmp_path: Path) -> None:
    """A malformed tokenizer file raises a one-line ValueError. transformers alone would raise
    arbitrary exceptions."""
    from megatron_rl.config import ModelSettings
    from megatron_rl.rollout.renderer import Renderer

    shutil.copytree(random_model, tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Renderer(ModelSettings(path=str(tmp_path / "model")))
