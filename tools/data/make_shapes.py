"""Writes a model with the size of a released model and random weights, to benchmark conversion.

The cost of conversion depends only on the names, shapes and sizes of tensors. Tensors are slices of
one random block, so that generating them takes less time than writing them to the disk. The model
contains a tokenizer and a processor only if --words provides them.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_rl.config import require, require_choice
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import RELEASED_SIZES, make_released_config
from megatron_rl.weights.formats.safetensors_folder import write_hf_folder
from megatron_rl.weights.formats.tensor_files import copy_companions
from megatron_rl_tools.commands import run_command

BLOCK_SIZE = 1 << 25
"""Size of the random block in elements: 64 MiB in bfloat16."""


def random_tensors(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, bfloat16 tensor) with random values of standard deviation 0.02.

    Each tensor starts at a random position in the random block.
    """
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(BLOCK_SIZE, generator=generator).mul_(0.02).bfloat16()
    for name, shape in shapes.items():
        start = int(torch.randint(BLOCK_SIZE, (1,), generator=generator))
        repeats = -(-(start + shape.numel()) // BLOCK_SIZE)
        yield name, block.repeat(repeats)[start : start + shape.numel()].view(shape)


TOKENIZER_KEYS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
"""Keys of config.json that depend on the tokenizer."""


def make_model(out: Path, size: str, *, family: str = "qwen2_5_vl", layers: int | None = None, words: Path | None = None) -> None:
    """Write the model folder.

    Args:
        out: Folder to write.
        size: Size of a released model of the family, such as "7B".
        family: Model family.
        layers: Number of decoder layers; None for the number of layers in the released model. The
            sizes of the tensors do not depend on this number.
        words: Folder from which the tokenizer, the processor and the token ids are copied, so that
            a rollout engine can load the model.

    Raises:
        ValueError: `out` exists, `words` has no tokenizer, or an argument is invalid.
    """
    require_choice("--size", size, tuple(RELEASED_SIZES[family]))
    require(layers is None or layers > 0, "--layers", layers, "must be at least 1")
    require(not out.exists(), "--out", out, "exists; choose another folder")
    config = make_released_config(size, family=family)
    if layers is not None:
        config.get("text_config", config)["num_hidden_layers"] = layers
    with tempfile.TemporaryDirectory() as folder:
        if words is not None:
            require((words / "tokenizer.json").is_file(), "--words", words, "has no tokenizer.json; use a complete Hugging Face folder")
            copy_companions(words, Path(folder))
            spoken = json.loads((words / "config.json").read_text())
            config |= {name: spoken[name] for name in TOKENIZER_KEYS}
        (Path(folder) / "config.json").write_text(json.dumps(config, indent=2))
        spec = read_spec(folder)
        named = ((spec.released_name(name), tensor) for name, tensor in random_tensors(spec.shapes()))
        write_hf_folder(out, named, like=Path(folder))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --size 3B --out checkpoints/random_3b          7.5 GB
  %(prog)s --size 7B --out checkpoints/random_7b          16.6 GB
  %(prog)s --size 72B --layers 2 --out DIR                same tensor sizes, a fraction of the bytes
  %(prog)s --family qwen3_vl --size 8B --out DIR          17.5 GB
  %(prog)s --size 7B --words runs/quickstart/nano --out DIR     a model that an engine can serve""",
    )  # fmt: skip
    parser.add_argument("--family", choices=RELEASED_SIZES, default="qwen2_5_vl", help="default: %(default)s")
    parser.add_argument(
        "--size", required=True, help="; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in RELEASED_SIZES.items())
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--layers", type=int, metavar="N", help="decoder layers; default: those of the released model")
    parser.add_argument("--words", type=Path, metavar="DIR", help="copy tokenizer, processor and token ids from this folder")
    given = parser.parse_args(arguments)

    def made() -> str:
        make_model(given.out, given.size, family=given.family, layers=given.layers, words=given.words)
        return f"{sum(path.stat().st_size for path in given.out.iterdir()):,} bytes in {given.out}"

    return run_command(made, out=given.out)


if __name__ == "__main__":
    sys.exit(main())
