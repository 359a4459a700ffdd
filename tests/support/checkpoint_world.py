"""A world that saves training states in one parallel layout or loads those of other layouts. Run
under torchrun by test_checkpoint.py.

    checkpoint_world.py MODEL OUT COMMAND ...

Commands are write:NAME, read:NAME:LAYOUT, full_disk:NAME, damaged:NAME and poisoned:NAME, with
names from VARIANTS and LAYOUTS.
"""

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.config import AlgoSettings, CriticSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.optimizer_state import optimizer_tensors
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.training_state import sharded_weights
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.weights.formats.torch_dist import McoreTensors
from tests.support.malicious_checkpoints import EXPLOITS
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import destroy_layout


@dataclass(frozen=True)
class Variant:
    layout: str
    model: dict = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)
    critic: CriticSettings | None = None


EXPERTS, DIVIDED, DIVIDED_TWICE = "experts", "experts_ep2", "experts_tp2_ep2"
"""Variants for models with experts, used by tests/parity/test_experts.py."""
LAYOUTS = {
    "one": ParallelSettings(),
    "tp2": ParallelSettings(tp=2),
    "pp2": ParallelSettings(pp=2),
    "vpp2": ParallelSettings(pp=2, vpp=2),
    "dp2": ParallelSettings(),
    "tp2_sp": ParallelSettings(tp=2, sequence_parallel=True),
    "ep2": ParallelSettings(ep=2),
    "tp2_ep2": ParallelSettings(tp=2, ep=2, sequence_parallel=True),
}
VARIANTS = {
    **{name: Variant(name) for name in ("one", "tp2", "pp2", "vpp2", "dp2")},
    EXPERTS: Variant("tp2_sp"),
    DIVIDED: Variant("ep2"),
    DIVIDED_TWICE: Variant("tp2_ep2"),
    "tp2_bf16": Variant("tp2", {"dtype": "bfloat16"}),
    "tp2_lora": Variant("tp2", lora=LoraSettings(rank=4, dropout=0.1, targets=["attention", "mlp", "vision", "projector"])),
    "dp2_lora": Variant("dp2", lora=LoraSettings(rank=4, targets=["attention", "mlp", "vision", "projector"])),
    "dp2_values": Variant("dp2", {"dtype": "bfloat16"}, critic=CriticSettings(head_sizes=[6], normalize_returns=True)),
    "pp2_frozen": Variant("pp2", {"frozen": ["language"]}),
}


class CheckpointWorld:
    """Builds policies in several layouts, one layout at a time, and trains them on the same
    sequences.
    """

    def __init__(self, model: Path, out: Path) -> None:
        self.model, self.out = model, out
        self.renderer = Renderer(ModelSettings(path=str(model)))
        self.contexts = make_example_items(self.renderer)

    @contextmanager
    def use_layout(self, layout: str) -> Iterator[None]:
        self.parallel = LAYOUTS[layout]
        self.layout, self.made = build_layout(self.parallel, seed=0), []
        try:
            yield
        finally:
            destroy_layout(*self.made)

    def policy(self, variant: Variant) -> Policy:
        made = Policy(
            ModelSettings(path=str(self.model), **variant.model), self.layout,
            training=TrainingSettings(
                parallel=self.parallel, optim=OptimSettings(lr=0.1, eps=1e-4, warmup_steps=5, weight_decay=0.01), num_steps=10,
                lora=variant.lora,
            ),
            special_tokens=self.renderer.special_tokens, critic=variant.critic,
        )  # fmt: skip
        self.made.append(made)
        return made

    def update(self, policy: Policy) -> dict[str, object]:
        """Run one update.

        Return its loss, the change of every tensor, and the next numbers of the random generators.
        """
        before = copy_weights(policy)
        batches, loss = policy.pack(self.contexts, max_tokens=10_000), make_policy_objective(AlgoSettings(entropy_coef=0.1))
        for batch in batches:
            batch.old_value_T = batch.return_T = torch.ones_like(batch.weight_T)
        metrics = policy.update(batches, loss, step=policy.network.num_updates)
        change = {name: tensor - before[name] for name, tensor in copy_weights(policy).items()}
        return {
            "loss": metrics["loss"],
            "lr": metrics["lr"],
            "grad_norm": metrics["grad_norm"],
            "change": change,
            "noise": draw_random_numbers(),
        }

    def save_result(self, name: str, result: dict[str, object]) -> None:
        if dist.get_rank() == 0:
            torch.save(result, self.out / f"{name}.pt")


def copy_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


def draw_random_numbers() -> list[float]:
    """Return numbers from the generator of every rank and from its tensor-parallel generator."""
    with megatron_on_cpu(), tensor_parallel.get_cuda_rng_tracker().fork():
        own = torch.rand(2).tolist()
    draws: list = [None] * dist.get_world_size()
    dist.all_gather_object(draws, torch.rand(2).tolist() + own)
    return [value for drawn in draws for value in drawn]


def make_folder(path: Path) -> Path:
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    return path


def write_checkpoint(world: CheckpointWorld, name: str) -> None:
    """Run two updates and save in the background.

    The writer is blocked until a third update has changed all weights, so the saved state must be a
    copy.
    """
    variant, trained = VARIANTS[name], Event()
    write_data = FileSystemWriter.write_data

    def write_late(*arguments: object) -> object:
        assert trained.wait(60)
        return write_data(*arguments)

    with world.use_layout(variant.layout):
        policy = world.policy(variant)
        for _ in range(2):
            world.update(policy)
        FileSystemWriter.write_data = write_late
        gathered = gather_by_megatron(policy)
        save = policy.save(make_folder(world.out / name), background=True)
        unbroken = {"weights": copy_weights(policy), **world.update(policy)}
        assert not save.is_written()
        trained.set()
        save.finish()
        assert save.is_written()
        FileSystemWriter.write_data = write_data
        written = load_tensors(world.out / name)
        unlike = [key for key, place, part in gathered if not matches_written(part, written[key][place])]
        world.save_result(name, {**unbroken, "gathered": gather_objects(len(gathered)), "unlike": gather_objects(unlike)})


def matches_written(part: torch.Tensor, written: torch.Tensor) -> bool:
    """Return True if the tensors are equal, bit for bit, except for the zero rows that pad a
    vocabulary.
    """
    return torch.equal(part[: len(written)], written) and not part[len(written) :].any()


def gather_by_megatron(policy: Policy) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """Return (key, slice, part) of the optimizer's tensors as Megatron itself gathers them, on the
    first rank of a data-parallel group.
    """
    how = {"non_homogeneous_layers": True, "distrib_optim_fully_reshardable_mem_efficient": True}
    found = {}
    with megatron_on_cpu(), torch.no_grad():
        for number, part in enumerate(policy.network.optimizer.chained_optimizers):
            if not part.is_stub_optimizer:
                found[number] = part.sharded_param_state_fully_reshardable(sharded_weights(policy.network.chunks), False, how) or {}
        apply_factories(found)
    return [(part.key, part.global_slice(), part.data.clone()) for part in nested_values(found)]


def gather_objects(local_value: object) -> list:
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, local_value)
    return everyones


def stored_sizes(path: Path) -> dict[tuple[str, int], tuple[str, int]]:
    """Return {(file, offset): (key, bytes of the tensor's part)} of a checkpoint."""
    metadata = FileSystemReader(path).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        (chunk,) = (chunk for chunk in stored.chunks if chunk.offsets == index.offset)
        found[info.relative_path, info.offset] = index.fqn, chunk.sizes.numel() * stored.properties.dtype.itemsize
    return found


def reload_checkpoint(world: CheckpointWorld, name: str, layout: str) -> None:
    """Load a checkpoint, save it again and compare all tensors, including the optimizer's; then run
    one update. Also records how many bytes each rank has read.
    """
    read_chunk, places = McoreTensors.read_chunk, []

    def counted(self: McoreTensors, key: str, offsets: torch.Size) -> torch.Tensor:
        info = self.metadata.storage_data[MetadataIndex(key, offsets)]
        places.append((info.relative_path, info.offset))
        return read_chunk(self, key, offsets)

    with world.use_layout(layout):
        policy = world.policy(VARIANTS[name])
        McoreTensors.read_chunk = counted
        policy.load(world.out / name, seed=1)
        McoreTensors.read_chunk = read_chunk
        stored = stored_sizes(world.out / name)
        was_read = gather_objects(sum(stored[place][1] for place in places if stored[place][0].startswith("optimizer.")))
        again = make_folder(world.out / f"{name}_at_{layout}")
        policy.save(again, background=False).finish()
        first, second = (load_tensors(path) for path in (world.out / name, again))
        different = [key for key in sorted(first) if key not in second or not torch.equal(first[key], second[key])]
        different += sorted(second.keys() - first.keys())
        told = {"different": different, "keys": sorted(first), "read": was_read, "own": gather_objects(own_optimizer_bytes(policy))}
        world.save_result(again.name, {**world.update(policy), **told})


def own_optimizer_bytes(policy: Policy) -> int:
    """Return the bytes of the main weights and moments that this rank updates, including copies on
    tensor-parallel ranks.
    """
    parts = [part for part in policy.network.optimizer.chained_optimizers if not part.is_stub_optimizer]
    return sum(12 * main.numel() for part in parts for group in part.optimizer.param_groups for main in group["params"])


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, unsharded, as read by Megatron's own reader."""
    with megatron_on_cpu():
        return {key: value for key, value in dist_checkpointing.load_plain_tensors(str(path)).items() if isinstance(value, torch.Tensor)}


def save_on_full_disk(world: CheckpointWorld, name: str) -> None:
    """Files of the last rank cannot grow beyond 100 kB. Every rank must raise the same OSError."""
    variant = VARIANTS[name]
    with world.use_layout(variant.layout):
        policy = world.policy(variant)
        world.update(policy)
        if dist.get_rank() == dist.get_world_size() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        save = policy.save(make_folder(world.out / f"{name}_full"), background=True)
        try:
            save.finish()
        except OSError as error:
            errors: list = [None] * dist.get_world_size()
            dist.all_gather_object(errors, str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        world.save_result(f"{name}_full", {"errors": errors})


def load_damaged(world: CheckpointWorld, name: str) -> None:
    """Loading a checkpoint with a truncated file must raise a ValueError."""
    variant, copy = VARIANTS[name], world.out / f"{name}_damaged"
    shutil.copytree(world.out / name, copy)
    os.truncate(copy / "__0_0.distcp", (copy / "__0_0.distcp").stat().st_size // 2)
    with world.use_layout(variant.layout):
        try:
            world.policy(variant).load(copy, seed=0)
        except ValueError as error:
            world.save_result(copy.name, {"error": str(error)})


def load_malicious(world: CheckpointWorld, name: str) -> None:
    """Load copies of a checkpoint with an exploit in each file that is read.

    Records the error, whether the exploit ran in this trainer's loader, and whether it ran in
    Megatron's own loader.
    """
    variant, told = VARIANTS[name], {}
    with world.use_layout(variant.layout):
        policy = world.policy(variant)
        for number, (where, poison) in enumerate(EXPLOITS.items()):
            copy, mark = world.out / f"{name}_poisoned_{number}", world.out / f"ran_{number}"
            shutil.copytree(world.out / name, copy)
            poison(copy, mark)
            try:
                policy.load(copy, seed=0)
                told[where] = {"said": "", "ran": mark.exists()}
            except ValueError as error:
                told[where] = {"said": str(error), "ran": mark.exists()}
            with megatron_on_cpu(), suppress(Exception, CheckpointException):  # control: only whether the exploit ran matters
                weights = sharded_weights(policy.network.chunks)
                moments = optimizer_tensors(policy.network.optimizer, weights, vocab_size=policy.spec.vocab_size)
                dist_checkpointing.load({"w": weights, "o": moments}, str(copy))
            told[where]["runs by itself"] = mark.exists()
            shutil.rmtree(copy)
        world.save_result(f"{name}_poisoned", told)


def main() -> None:
    connect(read_world(), timeout_s=60)
    world = CheckpointWorld(Path(sys.argv[1]), Path(sys.argv[2]))
    for command in sys.argv[3:]:
        verb, *arguments = command.split(":")
        {
            "write": write_checkpoint,
            "read": reload_checkpoint,
            "full_disk": save_on_full_disk,
            "damaged": load_damaged,
            "poisoned": load_malicious,
        }[verb](world, *arguments)


if __name__ == "__main__":
    main()
