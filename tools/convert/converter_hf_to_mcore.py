"""Converts a Hugging Face model folder to a Megatron distributed checkpoint (torch_dist).

The checkpoint can be loaded with any parallel layout. It contains the tensors and, in hf/, all
other files of the source (config, tokenizer, processor). The checkpoint is renamed to its final
name only after it is complete and verified. Converting needs memory for a few copies of the largest
tensor, regardless of the size of the model.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from rich.console import Console

from megatron_rl.config import ParallelSettings, require
from megatron_rl.io.jsonl import read_json
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.vocabulary import count_token_ids
from megatron_rl.weights.formats.checkpoint_source import EMBEDDINGS, HfNamedSource, describe_skipped
from megatron_rl.weights.formats.expert_layouts import check_loads_in_transformers, fuse_experts
from megatron_rl.weights.formats.open_checkpoint import set_config_dtype
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.formats.tensor_files import atomic_folder, copy_companions
from megatron_rl.weights.formats.to_mcore import McoreImport
from megatron_rl_tools.commands import DTYPES, progress_bar, quiet_libraries, run_command

PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}


def convert(hf: Path, out: Path, *, tp: int, pp: int, dtype: torch.dtype | None, force: bool, check_logits: bool, console: Console) -> str:
    """Convert the model folder `hf` to a checkpoint at `out` and return a one-line summary.

    Raises:
        ValueError: An option or the model is invalid; `out` is unchanged.
        OSError: A file cannot be read or written; `out` is unchanged.
    """
    check_output(out, force=force)
    spec = read_spec(hf, key="--hf")
    check_parallel_sizes(spec, tp=tp, pp=pp)
    stored = HfTensors(hf, key="--hf", read_once=True)
    if check_logits:
        check_loads_in_transformers(stored, key="--hf")
    source = HfNamedSource(fuse_experts(stored, spec.shapes()), spec.shapes(), num_token_ids=count_token_ids(hf))
    plan = McoreImport(source, spec.param_mappings(), dtype=dtype)
    with atomic_folder(out) as partial:
        with progress_bar() as bar:
            task = bar.add_task("converting", total=plan.num_bytes)
            plan.write(partial, tp=tp, progress=lambda num_bytes: bar.advance(task, num_bytes))
        for part in copy_companions(hf, partial / "hf"):
            console.print(f"warning: {hf} contains no {part}; add one to the model folder before training", **PLAIN)
        if dtype is not None:
            described = partial / "hf" / "config.json"
            described.write_text(json.dumps(set_config_dtype(read_json(described), dtype), indent=2))
        if check_logits:
            from megatron_rl_tools.convert.verify import verify_logits

            console.print(verify_logits(hf, partial, dtype=dtype), **PLAIN)
    if source.skipped:
        console.print(describe_skipped(source), **PLAIN)
    padding = stored.specs[EMBEDDINGS].shape[0] - source.specs[EMBEDDINGS].shape[0]
    left_out = f"; {padding} rows of vocabulary padding (beyond config.vocab_size) removed" if padding else ""
    return f"{len(source.specs)} tensors as {len(plan.target_specs)}, {plan.num_bytes:,} bytes, in {out}{left_out}"


def check_output(out: Path, *, force: bool) -> None:
    """Raise ValueError if `out` exists, unless `out` is a checkpoint and `force` is set."""
    require(force or not out.exists(), "--out", out, "exists; choose another folder, or --force to replace it")
    replaceable = not out.exists() or (out / "metadata.json").is_file()
    require(replaceable, "--out", out, "not a checkpoint (it has no metadata.json), so --force does not replace it")


def check_parallel_sizes(spec: ModelSpec, *, tp: int, pp: int) -> None:
    """Raise ValueError if the model does not support the layout; the message names the option."""
    try:
        parallel = ParallelSettings(tp=tp, pp=pp, sequence_parallel=tp > 1)
        if tp * pp > 1:
            from megatron_rl.policy.parallel import check_layout  # imports Megatron: 2 s, and warnings that main() silences

            check_layout(parallel, spec, world_size=tp * pp)
    except ValueError as error:
        raise ValueError(f"--{str(error).removeprefix('parallel.')}") from error


def find_model_folder(hf: str) -> Path:
    """Return the path of a model folder. Download the model if a Hub repository is given."""
    if Path(hf).is_dir():
        return Path(hf)
    require(re.fullmatch(r"[\w.-]+/[\w.-]+", hf) is not None, "--hf", hf, "neither a folder nor a repository name of the Hugging Face Hub")
    try:
        return Path(snapshot_download(hf, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"--hf={hf}: not a folder, and the download from the Hub failed ({type(error).__name__}); download it first"
        ) from error


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --hf checkpoints/Qwen2.5-VL-7B-Instruct --out checkpoints/7b_mcore
  %(prog)s --hf Qwen/Qwen2.5-VL-3B-Instruct --out checkpoints/3b_mcore            downloads it first
  %(prog)s --hf DIR --out DIR --tp 4 --pp 2        sharded for that layout; an error if the model is not divisible
  %(prog)s --hf DIR --out DIR --dtype bf16 --verify

exit codes: 0 the checkpoint is complete; 1 a one-line error, and nothing was written; 2 invalid options""",
    )  # fmt: skip
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder (safetensors), or a repository name of the Hub")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor-parallel size of the shards; the checkpoint can be loaded with any size"
    )
    parser.add_argument(
        "--pp", type=int, default=1, metavar="N", help="pipeline-parallel size of the shards; the checkpoint can be loaded with any size"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of all tensors in the result; default: as stored")
    parser.add_argument(
        "--verify", action="store_true", help="load the result into Megatron and compare its logits with those of the Hugging Face model"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = parse_arguments(arguments)
    quiet_libraries()
    options = {"tp": given.tp, "pp": given.pp, "dtype": DTYPES.get(given.dtype), "force": given.force, "check_logits": given.verify}
    return run_command(lambda: convert(find_model_folder(given.hf), given.out, console=Console(stderr=True), **options), out=given.out)


if __name__ == "__main__":
    sys.exit(main())
