"""Changes of a model folder that a resumed run rejects as another model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.io.sampled_digest import compute_sampled_digest
from megatron_rl.weights.formats.digests import compute_sha256
from megatron_rl.weights.formats.model_digests import FILES, check_same_model, model_digests


def turn_a_sign(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.input_layernorm.weight"))
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})


def write_more(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + "\n")


CHANGES = {
    "model.safetensors": turn_a_sign, "config.json": write_more("config.json"), "tokenizer.json": write_more("tokenizer.json"),
    "chat_template.jinja": write_more("chat_template.jinja"), "processor_config.json": write_more("processor_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_named_with_both_digests(name: str, random_model: Path, tmp_path: Path) -> None:
    """A change of weights, config, tokenizer, chat template or processor is rejected with the file
    and both digests."""
    folder = shutil.copytree(random_model, tmp_path / "model")
    before = model_digests(folder)
    assert before == model_digests(random_model)
    check_same_model(before, model_digests(folder), key="model.path", folder=folder)
    CHANGES[name](folder)
    now = model_digests(folder)
    assert {each for each in now if now[each] != before[each]} == {name}
    with pytest.raises(ValueError, match=f"^model.path={folder}: contains a different model than at the start of the run: the digest of "
                       f"{name} is {now[name]}, and was {before[name]}; "
                       "restore the original model, or choose another run.dir$"):  # fmt: skip
        check_same_model(before, now, key="model.path", folder=folder)
    if name in FILES:
        assert now[name] == compute_sha256(folder / name)


def test_a_file_that_is_gone_or_new_is_a_difference_and_a_model_card_is_none(random_model: Path, tmp_path: Path) -> None:
    """A file that was added, removed or renamed makes it another model; README.md does not."""
    folder = shutil.copytree(random_model, tmp_path / "model")
    before = model_digests(folder)
    (folder / "README.md").write_text("# A model\n")
    assert model_digests(folder) == before
    (folder / "chat_template.jinja").rename(folder / "chat_template.json")
    now = model_digests(folder)
    for recorded, found in ((before, now), (now, before)):
        with pytest.raises(ValueError, match=r"the digest of chat_template.j\w+ is \w+, and was none: the file does not exist; restore"):
            check_same_model(recorded, found, key="model.path", folder=folder)
    (folder / "chat_template.json").unlink()
    with pytest.raises(ValueError, match=r"of chat_template.jinja is none: the file does not exist, and was \w+; restore"):
        check_same_model(before, model_digests(folder), key="model.path", folder=folder)
    with pytest.raises(ValueError, match="of config.json is .*, and was none"):
        check_same_model({}, now, key="model.path", folder=folder)


def test_no_part_of_a_large_file_is_left_out(tmp_path: Path) -> None:
    """The sampled digest of a 40 MiB file changes for every modified run of three 4 KiB blocks.

    A file of less than 16 MiB is read completely.
    """
    path, large, small = tmp_path / "w", 40 << 20, (16 << 20) - 1
    path.write_bytes(bytes(large))
    before = compute_sampled_digest(path)
    for start in (0, 12345678, large - (3 << 12)):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\1" * (3 << 12))
        changed = compute_sampled_digest(path)
        assert changed != before
        before = changed
    path.write_bytes(bytes(small))
    before = compute_sampled_digest(path)
    path.write_bytes(bytes(small - 1) + b"\1")
    assert compute_sampled_digest(path) != before
