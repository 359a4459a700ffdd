"""Compares two checkpoints tensor by tensor.

A checkpoint can be a Hugging Face folder or a torch_dist checkpoint of this trainer. Tensors are
matched by their names in the released checkpoints, so the two compared checkpoints may use
different naming styles. Only one tensor of each checkpoint is in memory at a time.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_rl.models.hf_config import read_spec
from megatron_rl.weights.formats.checkpoint_source import HfNamedSource, TensorSource
from megatron_rl.weights.formats.expert_layouts import fuse_experts
from megatron_rl.weights.formats.open_checkpoint import detect_format, find_hf_folder, open_source
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl_tools.commands import format_error, quiet_libraries

CHUNK_SIZE = 1 << 24
"""Number of elements compared at a time; each element takes 8 bytes in double precision."""


@dataclass(slots=True, frozen=True)
class TensorDifference:
    """Result of comparing one tensor."""

    name: str
    dtypes_and_shapes: tuple[str, str]
    """Dtype and shape of the tensor in each checkpoint, or "nothing" if the tensor is missing."""
    largest: float | None
    """Largest absolute difference; None if the shapes differ or a checkpoint lacks the tensor."""
    is_bitwise: bool

    @property
    def verdict(self) -> str:
        """Text for the column "difference" of the printed table."""
        if self.largest is None:
            return "differs"
        return "equal" if self.is_bitwise else f"{self.largest:.3g}"

    def is_beyond(self, atol: float) -> bool:
        """Return True if the largest difference is None, NaN, or larger than `atol`."""
        return self.largest is None or not self.largest <= atol


def open_any_checkpoint(folder: Path) -> TensorSource:
    """Open a Hugging Face folder or a checkpoint of this trainer.

    For a Hugging Face folder, vocabulary padding and a second copy of tied embeddings are ignored.
    If the tensors of the folder do not match its config.json, the tensors are compared as stored,
    and the comparison reports the differences.
    """
    kind, like = detect_format(folder, key="folder"), find_hf_folder(folder)
    if kind == "hf":
        stored = HfTensors(folder, key="folder", read_once=True)
        try:
            shapes = read_spec(folder, key="folder").shapes()
            return HfNamedSource(fuse_experts(stored, shapes), shapes)
        except ValueError:
            return stored
    if like is None:
        raise ValueError(
            f"folder={folder}: no config.json in the folder or in its subfolder hf/; merge the checkpoint with --reference first"
        )
    return open_source(folder, read_spec(like, key="folder"), key="folder", read_once=True)


def compare_tensors(first: TensorSource, second: TensorSource) -> Iterator[TensorDifference]:
    """Yield one result per tensor. Tensors that are only in `second` come last."""
    for name in [*first.specs, *sorted(second.specs.keys() - first.specs.keys())]:
        sides = tuple(str(side.specs[name]) if name in side.specs else "nothing" for side in (first, second))
        if name not in first.specs or name not in second.specs or first.specs[name].shape != second.specs[name].shape:
            yield TensorDifference(name, sides, None, False)
            continue
        yield TensorDifference(name, sides, *_compare_tensor(first.read(name), second.read(name)))


def _compare_tensor(a: torch.Tensor, b: torch.Tensor) -> tuple[float, bool]:
    """Return a pair: the largest absolute difference, and True if the tensors are bitwise equal.

    If the tensors are not bitwise equal and one of them contains NaN, the difference is NaN.
    """
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return 0.0, True
    parts = zip(a.flatten().split(CHUNK_SIZE), b.flatten().split(CHUNK_SIZE), strict=True)
    gaps = torch.stack([(part_a.double() - part_b.double()).abs().max() for part_a, part_b in parts])
    return gaps.max().item(), False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def compare_checkpoints(first: Path, second: Path, *, atol: float, show_all: bool, logits: bool) -> bool:
    """Print the comparison and return True if no difference is larger than `atol`."""
    table = Table("tensor", str(first), str(second), "difference", box=box.ASCII)
    counts = {"equal": 0, "within": 0, "beyond": 0}
    for difference in compare_tensors(open_any_checkpoint(first), open_any_checkpoint(second)):
        beyond = difference.is_beyond(atol)
        counts["beyond" if beyond else "equal" if difference.is_bitwise else "within"] += 1
        if beyond or show_all:
            table.add_row(difference.name, *difference.dtypes_and_shapes, difference.verdict)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if table.rows:
        console.print(table)
    print(
        f"{counts['equal']} tensors bitwise equal, {counts['within']} within the tolerance of {atol:g}, "
        f"{counts['beyond']} outside the tolerance or without a counterpart"
    )
    same = counts["beyond"] == 0
    if logits:
        same &= compare_logits(first, second, atol=atol)
    return same


def compare_logits(first: Path, second: Path, *, atol: float) -> bool:
    """Run a text prompt and a two-image prompt through both fp32 models and print the differences.

    Returns True if no logit differs by more than `atol`.
    """
    from megatron_rl_tools.convert.verify import compute_hf_logits, compute_mcore_logits  # importing Megatron takes seconds and memory

    sides = [
        (compute_hf_logits if detect_format(folder, key="folder") == "hf" else compute_mcore_logits)(folder, key="folder")
        for folder in (first, second)
    ]
    gaps = {prompt: (sides[0][prompt] - sides[1][prompt]).abs().max().item() for prompt in sides[0]}
    for prompt, gap in gaps.items():
        print(f"logits of the {prompt}: largest difference {gap:.3g}, largest logit {sides[0][prompt].abs().max().item():.3g}")
    return all(gap <= atol for gap in gaps.values())


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s Qwen2.5-VL-7B-Instruct merged                       are all tensors bitwise equal?
  %(prog)s Qwen2.5-VL-7B-Instruct mcore --logits --atol 1e-4   compare weights and logits (HF and Megatron round differently)
  %(prog)s merged_step_100 merged_step_200 --all               how much did each tensor change?

exit codes: 0 no difference above --atol; 1 a difference above --atol, or a one-line error; 2 invalid arguments""",
    )
    parser.add_argument("first", type=Path, metavar="DIR", help="a Hugging Face folder or a torch_dist checkpoint of this trainer")
    parser.add_argument("second", type=Path, metavar="DIR", help="the checkpoint to compare with the first one")
    parser.add_argument(
        "--atol", type=float, default=0.0, help="maximum absolute difference between weights or logits that count as equal (default: 0)"
    )
    parser.add_argument(
        "--logits", action="store_true", help="also compare the fp32 logits of both models on a text prompt and a two-image prompt"
    )
    parser.add_argument("--all", action="store_true", dest="show_all", help="list all tensors, not only those that differ")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = vars(parse_arguments(arguments))
    quiet_libraries()
    try:
        return 0 if compare_checkpoints(options.pop("first"), options.pop("second"), **options) else 1
    except (ValueError, OSError) as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
