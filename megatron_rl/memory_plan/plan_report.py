"""Reports the GPU memory, the host memory and the expected time per step of a run (plan.only).

Nothing is loaded, and neither GPUs nor weights are needed.
"""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from megatron_rl.config import Settings
from megatron_rl.memory_plan.gpu_memory import MemoryPlan, RankMemoryPlan, plan_gpu_memory, require_fit
from megatron_rl.memory_plan.gpu_specs import GB, GPUS_PER_NODE, format_gb
from megatron_rl.memory_plan.host_memory import PROCESS_BYTES, host_memory_error
from megatron_rl.memory_plan.step_time import describe_step_time, make_step_time_inputs
from megatron_rl.models.model_spec import ModelSpec


def print_memory_plan(
    model: ModelSpec, settings: Settings, *, world_size: int, has_values: bool = False, uses_sandbox: bool = False
) -> MemoryPlan:
    """Print the plan and check that it fits.

    The memory of this machine is not checked, because the plan may be for another machine.

    Raises:
        ValueError: the plan does not fit the GPU, or the host memory given by plan.host_gb.
    """
    planned = plan_gpu_memory(model, settings, world_size=world_size, has_values=has_values, uses_sandbox=uses_sandbox)
    console = Console(highlight=False)
    replicas = world_size // len(planned.ranks)
    title = f"{settings.model.path}: GB on each GPU; {replicas} replicas, micro-batches of up to {planned.num_tokens:,} tokens"
    console.print(title, soft_wrap=True)
    console.print(_rank_table(planned))
    console.print(_engine_line(planned, settings), soft_wrap=True)
    if settings.stage == "rl":
        console.print(describe_step_time(make_step_time_inputs(model, settings, planned)), soft_wrap=True)
    console.print(_host_line(planned), soft_wrap=True)
    fits = require_fit(planned)
    misfit = host_memory_error(planned.host, settings, world_size=world_size) if settings.plan.host_gb else ""
    if misfit:
        raise ValueError(misfit)
    unjudged = "" if settings.plan.host_gb else "; host memory was not checked: set plan.host_gb to a node's memory"
    console.print(f"fits: {fits}{unjudged}", soft_wrap=True)
    return planned


def _rank_table(planned: MemoryPlan) -> Table:
    """Return a table with one column per group of consecutive ranks with equal memory needs."""
    equal = [
        list(ranks)
        for _, ranks in groupby(planned.ranks, key=lambda rank: (rank.rank_share.pp_rank, rank.rank_share.total_footprint, rank.peak_bytes))
    ]
    table = Table("")
    for ranks in equal:
        first, last = ranks[0].rank_share, ranks[-1].rank_share
        table.add_column(f"stage {first.pp_rank}, tp {first.tp_rank}" + (f"-{last.tp_rank}" if len(ranks) > 1 else ""), justify="right")
    columns = [_rank_column(ranks[0]) for ranks in equal]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _rank_column(rank: RankMemoryPlan) -> dict[str, str]:
    share, held = rank.rank_share, rank.rank_share.total_footprint
    sizes = {
        "weights": held.param_bytes, "gradients": held.grad_bytes, "optimizer": rank.optimizer_bytes,
        "activations": rank.activations.total_bytes,
        "update": rank.update_bytes, "sync": rank.sync_bytes, "rollout": rank.rollout_bytes,
    }  # fmt: skip
    counts = {"parameters": f"{share.num_params:,}", "trained parameters": f"{share.num_trained_params:,}"}
    return {**counts, **{name: f"{size / GB:.1f}" for name, size in sizes.items()}}


def _engine_line(planned: MemoryPlan, settings: Settings) -> str:
    engine, servers = planned.engine, settings.engine.num_local_servers
    where = f"{servers} servers on {servers * settings.engine.tp} additional GPUs of the first node, each " if servers else ""
    contexts = engine.cache_tokens / settings.engine.max_model_len
    return (
        f"engine: {where}{format_gb(engine.budget_bytes)} = weights {format_gb(engine.weight_bytes)}, "
        f"largest step {format_gb(engine.step_bytes)}, "
        f"cache {format_gb(engine.cache_bytes)}: {engine.cache_tokens:,} tokens, {contexts:.1f} full sequences"
    )


def _host_line(planned: MemoryPlan) -> str:
    host, ranks = planned.host, min(planned.world_size, GPUS_PER_NODE)
    sent = f"weights for remote engines {format_gb(host.published_weight_bytes)} + " if host.published_weight_bytes else ""
    hidden = f"hidden states of the teacher at most {format_gb(host.teacher_hidden_bytes)}, " if host.teacher_hidden_bytes else ""
    hidden += f"top tokens of the teacher at most {format_gb(host.teacher_top_bytes)}, " if host.teacher_top_bytes else ""
    return (
        f"host memory of a node with {ranks} GPUs: up to {format_gb(host.node_bytes(ranks))} = {sent}{ranks} x ("
        f"processes {format_gb(PROCESS_BYTES)}, optimizer {format_gb(host.optimizer_bytes)}, "
        f"copies of weights {format_gb(host.weight_copy_bytes)}, a checkpoint {format_gb(host.checkpoint_bytes)}, {hidden}"
        f"a step's images at most {format_gb(host.image_bytes)}, sandboxes {format_gb(host.sandbox_bytes)}; "
        "engine.max_images and task.max_pixels bound the images)"
    )
