"""Makes a complete Hugging Face folder of a checkpoint: this trainer's, classic Megatron (mp_rank_*), verl's FSDP shards, Hugging Face.

Every tensor of the checkpoint is used exactly once and every tensor of the model is written exactly once, with the shape that config.json
asks for; the written files are read back before the folder gets its name. Anything else is an error, and no folder is left.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import nested_name
from megatron_rl.models.vocabulary import count_token_ids
from megatron_rl.weights.formats.checkpoint_source import NamedSource, TensorSource, TensorSpec, check_names, describe_skipped
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import as_dtype, critics_part, hf_part, kind_of, open_source
from megatron_rl.weights.formats.pixel_limits import read_pixel_limits
from megatron_rl.weights.formats.safetensors_folder import INDEX, HfTensors, write_hf_folder
from megatron_rl.weights.formats.tensor_files import prefetch
from tools.commands import DTYPES, ended, progress_bar, quiet_libraries

STYLES = ("released", "nested")
"""How tensors are called. transformers 5.19 and vLLM 0.32 load both; released is what Qwen published, and what older ones load too
(of Qwen3-VL: nested)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Merge:
    """What one call of the merger is asked for."""

    checkpoint: Path
    out: Path
    dtype: torch.dtype | None
    reference: Path | None
    style: str
    lora: Path | None
    verify: bool
    force: bool


def merge(asked: Merge) -> str:
    """Write the folder and return a line that says what was written. Raises ValueError and OSError; then there is no folder."""
    _check_out(asked)
    kind = kind_of(asked.checkpoint, key="--checkpoint")
    like = asked.reference or hf_part(asked.checkpoint)
    if like is None:
        raise ValueError(f"--checkpoint={asked.checkpoint}: no config.json in it or in its hf/ or huggingface/; give --reference HF_DIR")
    spec = read_spec(like, key="--reference" if asked.reference else "--checkpoint")
    source = open_source(asked.checkpoint, spec, key="--checkpoint", once=True)
    if asked.reference is not None:
        reference = HfTensors(asked.reference, key="--reference")
        NamedSource(reference, spec.shapes(), num_token_ids=count_token_ids(like))  # raises unless it is a model of the same tensors
    if asked.lora is not None:
        if isinstance(source, MergedTensors):
            raise ValueError(f"--lora={asked.lora}: the checkpoint is of a run that trained an adapter, which is merged; leave --lora out")
        source = MergedTensors(source, asked.lora, key="--lora")
        if source.warning:
            print(f"warning: {source.warning}", file=sys.stderr)
    _check_verify(asked, kind, is_merged=isinstance(source, MergedTensors))
    specs = {name: TensorSpec(asked.dtype or spec.dtype, spec.shape) for name, spec in source.specs.items()}
    size = sum(spec.nbytes for spec in specs.values())

    def check(partial: Path) -> None:
        _check_written(partial, specs)
        if asked.verify:
            print(_verify(partial, asked.checkpoint), file=sys.stderr)

    stored, named = read_json(like / "config.json"), nested_name if asked.style == "nested" else spec.released
    trained = hf_part(asked.checkpoint)
    pixels = read_pixel_limits(trained) if trained is not None and asked.reference is not None else None
    with progress_bar() as progress:
        task = progress.add_task(asked.out.name, total=size)
        lacking = write_hf_folder(
            asked.out, _tensors(source, specs, named, lambda nbytes: progress.advance(task, nbytes)),
            like=like, pixels=pixels, config=as_dtype(stored, asked.dtype) if asked.dtype else None, check=check,
        )  # fmt: skip
    if source.skipped:
        print(describe_skipped(source), file=sys.stderr)
    for part in critics_part(asked.checkpoint, key="--checkpoint"):
        print(f"left out: {part} is the critic's", file=sys.stderr)
    for part in lacking:
        print(f"warning: {like} has no {part}, so {asked.out} has none", file=sys.stderr)
    return f"{asked.out}: {len(specs)} tensors, {size:,} bytes, from {kind} {asked.checkpoint}"


def check_not_input(asked: Merge) -> None:
    """Refuse to write where one of the inputs lies."""
    out = asked.out.resolve()
    for option, path in (("--checkpoint", asked.checkpoint), ("--reference", asked.reference), ("--lora", asked.lora)):
        if path is not None and (out == path.resolve() or out in path.resolve().parents):
            raise ValueError(f"--out={asked.out}: holds {option}={path}; choose another folder")


def _check_out(asked: Merge) -> None:
    """Refuse to overwrite what was not meant."""
    check_not_input(asked)
    if asked.out.exists():
        if not asked.force:
            raise ValueError(f"--out={asked.out}: exists; choose another folder, or --force to replace it")
        if not (asked.out / "config.json").is_file():
            raise ValueError(f"--out={asked.out}: is no Hugging Face folder (it has no config.json), so --force does not replace it")


def _check_verify(asked: Merge, kind: str, *, is_merged: bool) -> None:
    """Refuse to promise a comparison of logits that would not be one."""
    if not asked.verify:
        return
    if kind != "torch_dist":
        raise ValueError(
            f"--verify: {asked.checkpoint} is no torch_dist checkpoint of this trainer, so its logits cannot be computed here; "
            "leave it out, and compare names and shapes with --reference HF_DIR"
        )
    if asked.dtype or is_merged:
        raise ValueError("--verify: compares the weights as they are stored; merge without --dtype, and without an adapter")


def _verify(partial: Path, checkpoint: Path) -> str:
    from tools.convert.verify import verify  # Megatron takes seconds and memory to import

    return verify(partial, checkpoint)


def _tensors(
    source: TensorSource, specs: dict[str, TensorSpec], rename: Callable[[str], str], advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor once, under its name in the result."""
    read = prefetch(lambda name: source.read(name).to(specs[name].dtype), specs)
    for (name, spec), tensor in zip(specs.items(), read, strict=True):
        assert tensor.shape == spec.shape, f"{name}: {tuple(tensor.shape)} was read, {spec} was planned"
        yield rename(name), tensor
        advance(spec.nbytes)


def _check_written(folder: Path, specs: dict[str, TensorSpec]) -> None:
    """Raise ValueError unless the files hold what was planned, tensor by tensor and in bytes."""
    written = HfTensors(folder, key="--out")
    check_names(written.specs, specs, source=f"--out={folder}", target="the checkpoint")
    for name, spec in specs.items():
        if written.specs[name] != spec:
            raise ValueError(f"--out={folder}: {name} was written as {written.specs[name]}, the checkpoint gives {spec}")
    planned, total = sum(spec.nbytes for spec in specs.values()), read_json(folder / INDEX)["metadata"]["total_size"]
    if total != planned:
        raise ValueError(f"--out={folder}: {total} bytes were written, the checkpoint gives {planned}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="merger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --checkpoint run/checkpoints/step_00000300 --out merged                   a checkpoint of this trainer
  %(prog)s --checkpoint global_step_80/actor --out merged --dtype bf16               verl's FSDP shards (fp32) or its mp_rank folders
  %(prog)s --checkpoint iter_0000100 --reference Qwen2.5-VL-7B-Instruct --out merged  Megatron-LM's, which have no config.json
  %(prog)s --checkpoint mcore --out merged --lora run/adapter                        with a PEFT adapter added to the weights
  %(prog)s --checkpoint mcore --out merged --verify                                  and the logits of both compared

exit codes: 0 the folder is complete; 1 an error, in one line, and no folder; 2 wrong arguments""",
    )
    add_options(parser)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="the folder with the checkpoint's files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that merging one checkpoint and merging many have in common."""
    parser.add_argument("--dtype", choices=DTYPES, help="number type of the result (default: as stored)")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="HF_DIR",
        help="take config, tokenizer and processor from here, and hold names and shapes against it",
    )
    parser.add_argument(
        "--style",
        choices=STYLES,
        default="released",
        help="tensor names: released (default; visual.*, model.*, of Qwen3-VL nested) or nested (model.visual.*, model.language_model.*)",
    )
    parser.add_argument("--lora", type=Path, metavar="PEFT_DIR", help="merge this LoRA adapter into the weights")
    parser.add_argument(
        "--verify", action="store_true", help="compare logits of the result in transformers with the checkpoint's in Megatron"
    )
    parser.add_argument("--force", action="store_true", help="replace a Hugging Face folder at --out")


def main(arguments: list[str] | None = None) -> int:
    options = vars(parse_arguments(arguments))
    options["dtype"] = DTYPES.get(options["dtype"])
    quiet_libraries()
    asked = Merge(**options)
    return ended(lambda: merge(asked), out=asked.out)


if __name__ == "__main__":
    sys.exit(main())
