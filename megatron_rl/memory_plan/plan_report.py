"""run.dry: what a run would need of every GPU and of the host, as tables, and the seconds that its steps are expected to take; nothing is
loaded, no GPU and no weights are needed."""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from megatron_rl.config import Settings
from megatron_rl.memory_plan.gpu_memory import Plan, SharePlan, plan, require_fit
from megatron_rl.memory_plan.gpu_specs import GB, GPUS_A_NODE, in_gb
from megatron_rl.memory_plan.host_memory import PROCESS, host_misfit
from megatron_rl.memory_plan.step_time import case_of, in_words
from megatron_rl.models.model_spec import ModelSpec


def dry_run(model: ModelSpec, settings: Settings, *, world_size: int, has_values: bool = False, has_boxes: bool = False) -> Plan:
    """Print the plan and one verdict. Raises ValueError where it does not fit the GPU, or the main memory that is stated (run.host_gb).

    This machine's main memory is not judged: the plan is of GPUs that may be elsewhere.
    """
    planned = plan(model, settings, world_size=world_size, has_values=has_values, has_boxes=has_boxes)
    console = Console(highlight=False)
    replicas = world_size // len(planned.ranks)
    title = f"{settings.model.path}: GB on each GPU; {replicas} replicas, micro-batches of up to {planned.num_tokens:,} tokens"
    console.print(title, soft_wrap=True)
    console.print(_ranks(planned))
    console.print(_engine(planned, settings), soft_wrap=True)
    if settings.stage == "rl":
        console.print(in_words(case_of(model, settings, planned)), soft_wrap=True)
    console.print(_host(planned), soft_wrap=True)
    fits = require_fit(planned)
    misfit = host_misfit(planned.host, settings, world_size=world_size) if settings.run.host_gb else ""
    if misfit:
        raise ValueError(misfit)
    unjudged = "" if settings.run.host_gb else "; main memory was not judged: run.host_gb states a node's"
    console.print(f"fits: {fits}{unjudged}", soft_wrap=True)
    return planned


def _ranks(planned: Plan) -> Table:
    """A column for each run of tensor-parallel ranks with equal shares."""
    equal = [list(ranks) for _, ranks in groupby(planned.ranks, key=lambda rank: (rank.share.pp_rank, rank.share.held, rank.peak))]
    table = Table("")
    for ranks in equal:
        first, last = ranks[0].share, ranks[-1].share
        table.add_column(f"stage {first.pp_rank}, tp {first.tp_rank}" + (f"-{last.tp_rank}" if len(ranks) > 1 else ""), justify="right")
    columns = [_column(ranks[0]) for ranks in equal]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(rank: SharePlan) -> dict[str, str]:
    share, held = rank.share, rank.share.held
    sizes = {
        "weights": held.parameters, "gradients": held.gradients, "optimizer": rank.optimizer, "activations": rank.activations.total,
        "update": rank.update, "sync": rank.sync, "rollout": rank.rollout,
    }  # fmt: skip
    counts = {"parameters": f"{share.num_parameters:,}", "of them trained": f"{share.num_trained:,}"}
    return {**counts, **{name: f"{size / GB:.1f}" for name, size in sizes.items()}}


def _engine(planned: Plan, settings: Settings) -> str:
    engine, servers = planned.engine, settings.engine.num_local_servers
    where = f"{servers} servers on {servers * settings.engine.tp} more GPUs of the first node, each " if servers else ""
    contexts = engine.cache_tokens / settings.engine.max_model_len
    return (
        f"engine: {where}{in_gb(engine.budget)} = weights {in_gb(engine.weights)}, largest step {in_gb(engine.working)}, "
        f"cache {in_gb(engine.cache)}: {engine.cache_tokens:,} tokens, {contexts:.1f} full contexts"
    )


def _host(planned: Plan) -> str:
    host, ranks = planned.host, min(planned.world_size, GPUS_A_NODE)
    sent = f"weights for engines elsewhere {in_gb(host.sent)} + " if host.sent else ""
    return (
        f"host, a node of {ranks}: up to {in_gb(host.of_node(ranks))} = {sent}{ranks} x (processes {in_gb(PROCESS)}, "
        f"optimizer {in_gb(host.optimizer)}, copies of weights {in_gb(host.copies)}, "
        f"a checkpoint {in_gb(host.checkpoint)}, a step's pictures at most {in_gb(host.pictures)}, "
        f"boxes {in_gb(host.boxes)}; engine.max_images and task.max_pixels bound the pictures)"
    )
