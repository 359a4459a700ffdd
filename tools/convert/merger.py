"""Merges a checkpoint into a complete Hugging Face folder.

The source can be a checkpoint of this trainer, a classic Megatron checkpoint (mp_rank_*), FSDP
shards written by verl, or a Hugging Face folder. Every tensor of the checkpoint is used exactly
once, and every tensor of the model is written exactly once, with the shape that config.json
requires. The headers of the written files are read back before the folder is renamed to its final
name. Any mismatch raises an error, and no output folder is left behind.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import nested_name
from megatron_rl.models.vocabulary import count_token_ids
from megatron_rl.weights.formats.checkpoint_source import HfNamedSource, TensorSource, TensorSpec, check_names, describe_skipped
from megatron_rl.weights.formats.expert_layouts import EXPERT_LAYOUTS, fuse_experts
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import detect_format, find_critic_parts, find_hf_folder, open_source, set_config_dtype
from megatron_rl.weights.formats.pixel_limits import read_pixel_limits
from megatron_rl.weights.formats.safetensors_folder import INDEX_FILE, HfTensors, write_hf_folder
from megatron_rl.weights.formats.tensor_files import prefetch
from megatron_rl_tools.commands import DTYPES, progress_bar, quiet_libraries, run_command

NAME_STYLES = ("released", "nested")
"""Naming styles for tensors.

transformers 5.19 and vLLM 0.32 load both styles. "released" is the style of Qwen's published
checkpoints, which older versions of the two packages also load. "nested" is the style with the
prefixes model.visual and model.language_model. For Qwen3-VL, both styles are the same.
"""

Arrange = Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]
"""Function (name, tensor) -> the names and tensors to write; see EXPERT_LAYOUTS."""


@dataclass(slots=True, frozen=True, kw_only=True)
class MergeOptions:
    """Options of one merge; each field is a command-line option."""

    checkpoint: Path
    out: Path
    dtype: torch.dtype | None
    reference: Path | None
    style: str
    experts: str
    lora: Path | None
    verify: bool
    force: bool


def merge_checkpoint(merge_options: MergeOptions) -> str:
    """Merge a checkpoint into a Hugging Face folder and return a one-line summary.

    Raises:
        ValueError: An option or the checkpoint is invalid; no folder is written.
        OSError: A file cannot be read or written; no folder is written.
    """
    _check_output(merge_options)
    kind = detect_format(merge_options.checkpoint, key="--checkpoint")
    like = merge_options.reference or find_hf_folder(merge_options.checkpoint)
    if like is None:
        raise ValueError(
            f"--checkpoint={merge_options.checkpoint}: no config.json in this folder or in its subfolders hf/ and huggingface/; "
            f"set --reference HF_DIR"
        )
    spec = read_spec(like, key="--reference" if merge_options.reference else "--checkpoint")
    source = open_source(merge_options.checkpoint, spec, key="--checkpoint", read_once=True)
    if merge_options.reference is not None:
        _check_reference(merge_options.reference, spec)
    if merge_options.lora is not None:
        if isinstance(source, MergedTensors):
            raise ValueError(
                f"--lora={merge_options.lora}: the checkpoint already contains a trained adapter, which is merged; remove --lora"
            )
        source = MergedTensors(source, merge_options.lora, key="--lora")
        if source.warning:
            print(f"warning: {source.warning}", file=sys.stderr)
    _check_verify(merge_options, kind, is_merged=isinstance(source, MergedTensors))
    if merge_options.experts == "separate" and spec.experts is None:
        raise ValueError("--experts=separate: the model has no experts; remove the option")
    specs = {name: TensorSpec(merge_options.dtype or spec.dtype, spec.shape) for name, spec in source.specs.items()}
    size = sum(spec.nbytes for spec in specs.values())
    arrange = partial(EXPERT_LAYOUTS[merge_options.experts], shapes={name: spec.shape for name, spec in specs.items()})
    written = {part: spec for name, whole in specs.items() for part, spec in _written_specs(name, whole, arrange)}

    def check(folder: Path) -> None:
        _check_written(folder, written)
        if merge_options.verify:
            print(_verify_logits(folder, merge_options.checkpoint), file=sys.stderr)

    stored, named = read_json(like / "config.json"), nested_name if merge_options.style == "nested" else spec.released_name
    trained = find_hf_folder(merge_options.checkpoint)
    pixels = read_pixel_limits(trained) if trained is not None and merge_options.reference is not None else None
    with progress_bar() as progress:
        task = progress.add_task(merge_options.out.name, total=size)
        lacking = write_hf_folder(
            merge_options.out, _rename_tensors(source, specs, arrange, named, lambda nbytes: progress.advance(task, nbytes)),
            like=like, pixels=pixels, config=set_config_dtype(stored, merge_options.dtype) if merge_options.dtype else None, check=check,
        )  # fmt: skip
    if source.skipped:
        print(describe_skipped(source), file=sys.stderr)
    for part in find_critic_parts(merge_options.checkpoint, key="--checkpoint"):
        print(f"not merged: {part}, which belongs to the critic", file=sys.stderr)
    for part in lacking:
        print(f"warning: {like} contains no {part}; {merge_options.out} was written without one", file=sys.stderr)
    return f"{merge_options.out}: {len(written)} tensors, {size:,} bytes, from {kind} {merge_options.checkpoint}"


def check_not_input(merge_options: MergeOptions) -> None:
    """Raise ValueError if `out` is an input folder or contains an input folder."""
    out = merge_options.out.resolve()
    for option, path in (
        ("--checkpoint", merge_options.checkpoint),
        ("--reference", merge_options.reference),
        ("--lora", merge_options.lora),
    ):
        if path is not None and (out == path.resolve() or out in path.resolve().parents):
            raise ValueError(f"--out={merge_options.out}: contains {option}={path}; choose another folder")


def _check_output(merge_options: MergeOptions) -> None:
    """Raise ValueError if `out` exists, unless it is a Hugging Face folder and `force` is set."""
    check_not_input(merge_options)
    if merge_options.out.exists():
        if not merge_options.force:
            raise ValueError(f"--out={merge_options.out}: exists; choose another folder, or --force to replace it")
        if not (merge_options.out / "config.json").is_file():
            raise ValueError(
                f"--out={merge_options.out}: not a Hugging Face folder (it has no config.json), so --force does not replace it"
            )


def _check_verify(merge_options: MergeOptions, kind: str, *, is_merged: bool) -> None:
    """Raise ValueError if `verify` is set but the logits of this merge cannot be verified."""
    if not merge_options.verify:
        return
    if kind != "torch_dist":
        raise ValueError(
            f"--verify: {merge_options.checkpoint} is not a torch_dist checkpoint of this trainer, so its logits cannot be computed; "
            "remove --verify, and compare names and shapes with --reference HF_DIR"
        )
    if merge_options.dtype or is_merged:
        raise ValueError("--verify: only supported for weights as stored; merge without --dtype and without an adapter")
    if merge_options.experts == "separate":
        raise ValueError("--verify: transformers does not read separate experts; merge with --experts fused to compare logits")


def _check_reference(folder: Path, spec: ModelSpec) -> None:
    """Raise ValueError unless the reference folder has exactly the tensors of the model."""
    shapes = spec.shapes()
    reference = fuse_experts(HfTensors(folder, key="--reference"), shapes)
    HfNamedSource(reference, shapes, num_token_ids=count_token_ids(folder))


def _written_specs(name: str, spec: TensorSpec, arrange: Arrange) -> Iterator[tuple[str, TensorSpec]]:
    for part, tensor in arrange(name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")):
        yield part, TensorSpec(tensor.dtype, tensor.shape)


def _verify_logits(partial: Path, checkpoint: Path) -> str:
    from megatron_rl_tools.convert.verify import verify_logits  # importing Megatron takes seconds and memory

    return verify_logits(partial, checkpoint)


def _rename_tensors(
    source: TensorSource, specs: dict[str, TensorSpec], arrange: Arrange, rename: Callable[[str], str], advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor once, with output name and dtype, in the layout of `arrange`."""
    read = prefetch(lambda name: source.read(name).to(specs[name].dtype), specs)
    for (name, spec), tensor in zip(specs.items(), read, strict=True):
        assert tensor.shape == spec.shape, f"{name}: read shape {tuple(tensor.shape)}, expected {spec}"
        for part, piece in arrange(name, tensor):
            yield rename(part), piece
        advance(spec.nbytes)


def _check_written(folder: Path, specs: dict[str, TensorSpec]) -> None:
    """Raise ValueError unless the files contain the planned tensors with the planned total size."""
    written = HfTensors(folder, key="--out")
    check_names(written.specs, specs, source=f"--out={folder}", target="the checkpoint")
    for name, spec in specs.items():
        if written.specs[name] != spec:
            raise ValueError(f"--out={folder}: {name} was written as {written.specs[name]}, but the checkpoint has {spec}")
    planned, total = sum(spec.nbytes for spec in specs.values()), read_json(folder / INDEX_FILE)["metadata"]["total_size"]
    if total != planned:
        raise ValueError(f"--out={folder}: {total} bytes were written, but the checkpoint has {planned}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="merger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --checkpoint run/checkpoints/step_00000300 --out merged                   a checkpoint of this trainer
  %(prog)s --checkpoint global_step_80/actor --out merged --dtype bf16               verl's FSDP shards (fp32) or its mp_rank folders
  %(prog)s --checkpoint iter_0000100 --reference Qwen2.5-VL-7B-Instruct --out merged  a Megatron-LM checkpoint, which has no config.json
  %(prog)s --checkpoint mcore --out merged --lora run/adapter                        with a PEFT adapter merged into the weights
  %(prog)s --checkpoint mcore --out merged --verify                                  and compare the logits of both

exit codes: 0 the folder is complete; 1 a one-line error, and no folder was written; 2 invalid arguments""",
    )
    add_options(parser)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="the folder with the checkpoint's files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are common to merging one checkpoint and merging a whole run."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the result (default: as stored)")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="HF_DIR",
        help="copy config, tokenizer and processor from this folder, and check tensor names and shapes against its config",
    )
    parser.add_argument(
        "--style",
        choices=NAME_STYLES,
        default="released",
        help="tensor names: released (default), as in the released checkpoints, or nested (model.visual.*, model.language_model.*)",
    )
    parser.add_argument(
        "--experts",
        choices=EXPERT_LAYOUTS,
        default="fused",
        help="fused (default): one tensor for all experts, as in the released checkpoints; separate: three tensors for each expert",
    )
    parser.add_argument("--lora", type=Path, metavar="PEFT_DIR", help="merge this LoRA adapter into the weights")
    parser.add_argument(
        "--verify", action="store_true", help="compare the logits of the result (transformers) and of the checkpoint (Megatron)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing Hugging Face checkpoint at --out")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = vars(parse_arguments(arguments))
    options["dtype"] = DTYPES.get(options["dtype"])
    quiet_libraries()
    asked = MergeOptions(**options)
    return run_command(lambda: merge_checkpoint(asked), out=asked.out)


if __name__ == "__main__":
    sys.exit(main())
