"""What a run needs, looked at before it is started, on the machine where it will run (launch/doctor.py)."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

from rich.console import Console

import sandbox
import sandbox.doctor
import sandbox.layers
from megatron_rl.algo.rollout_correction import mismatch_warnings
from megatron_rl.clients.health_check import HealthCheck, check_endpoints, health_warning
from megatron_rl.clients.openai import api_key, make_client
from megatron_rl.config import JudgeSettings, SandboxSettings, Settings, service_of
from megatron_rl.data.benchmarks.catalog import questions_of
from megatron_rl.data.prompt_lengths import Prompts, around
from megatron_rl.data.questions import Questions
from megatron_rl.data.survey import Survey, survey
from megatron_rl.data.transcript_survey import make_length_check
from megatron_rl.data.transcripts import open_transcripts, survey_transcripts
from megatron_rl.distributed.world import read_world
from megatron_rl.errors import InfraError
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.metrics import check_trackio, check_wandb
from megatron_rl.preflight.check_report import Report, show
from megatron_rl.preflight.doctor_job import examine_together, look_at_time
from megatron_rl.preflight.doctor_machine import look_at_machine, look_at_plan
from megatron_rl.preflight.doctor_services import look_at_engines, look_at_services
from megatron_rl.registry import Plugins, build_task
from megatron_rl.rewards.accuracy import family
from megatron_rl.rewards.answer import NUMERIC_SOURCES
from megatron_rl.rollout.manager import render_prompt
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.visual_python.task import sandbox_client
from megatron_rl.weights.formats.safetensors_folder import HfTensors

USES_SANDBOX = ("visual_python", "visual_search")
"""Tasks (task.name) whose episodes may run code."""
USES_DATA = ("visual_python", "vqa")
"""Tasks of the user's data, and what of it each stage reads."""
READS = {"rl": ("train", "eval"), "sft": ("demonstrations", "eval")}


def look_at_model(settings: Settings, report: Report) -> Renderer | None:
    """Its folder, tokenizer and processor. Without them prompts cannot be measured."""
    if not look_at_folder(settings.model.path, report, key="model.path"):
        return None
    try:
        return Renderer(settings.model, allow_grounding_tokens=settings.task.data.allow_grounding_tokens)
    except (ValueError, OSError) as error:
        report.fail("tokenizer", of_folder(error, settings.model.path, key="model.path"))
        return None


def look_at_folder(path: str, report: Report, *, key: str) -> bool:
    """Whether a model's config is there, and the headers of all its tensors."""
    try:
        spec, stored = read_spec(path, key=key), HfTensors(path, key=key).specs
    except (ValueError, OSError) as error:
        report.fail(key, of_folder(error, path, key=key))
        return False
    absent = sorted(spec.shapes().keys() - stored.keys())
    if absent:
        report.fail(key, f"{key}={path}: has no {absent[0]} and {len(absent) - 1} more tensors; download it again")
        return False
    report.say(key, f"{path}: {spec.num_layers} layers of {spec.hidden_size}, {len(stored)} tensors")
    return True


def of_folder(error: Exception, path: str, *, key: str) -> str:
    return str(error) if str(error).startswith(key) else f"{key}={path}: {one_line(error)}"


def look_at_task(settings: Settings, report: Report, own: Plugins) -> Task | None:
    """Whether the task takes its settings."""
    try:
        task = build_task(settings.task, own)
    except ValueError as error:
        report.fail("task", str(error))
        return None
    report.say("task", settings.task.name)
    return task


def look_at_data(settings: Settings, report: Report, *, renderer: Renderer | None, task: Task | None) -> None:
    """Every row of every file that the run names."""
    data = settings.task.data
    given = {"train": data.train, "eval": data.eval, "demonstrations": data.demonstrations}
    lacking = [split for split in READS[settings.stage] if settings.task.name in USES_DATA and not given[split]]
    for split in lacking:
        if not any(line.startswith(f"task.data.{split}=") for line in report.errors):  # the task may have said so
            report.fail(f"data.{split}", f"task.data.{split}=[]: give the files, JSON lists, JSON lines or Parquet")
    opened: dict[str, Questions] = {}
    for split in ("train", "eval"):
        try:
            if given[split]:
                opened[split] = questions_of(data, split)
        except ValueError as error:
            report.fail(f"data.{split}", str(error))
    beside = around_of(settings, task, opened, renderer) if renderer and task else 0
    for split, questions in opened.items():
        prompts = Prompts(settings, renderer, around=beside) if renderer else None
        found = survey(questions, look=prompts.look if prompts else None)
        tell_questions(found, report, split=split, longest=prompts.longest if prompts else None)
        if prompts is not None and settings.stage == "rl":  # a warm start plays its evaluation alone, and starts all the same
            num = (split == "eval" and data.max_eval) or len(questions)
            look_at_misfits(prompts, report, split=split, num=num, told="".join(found.warnings[:1]))
    if data.demonstrations:
        look_at_transcripts(settings, report, renderer=renderer)


def look_at_transcripts(settings: Settings, report: Report, *, renderer: Renderer | None) -> None:
    """Every row of the files of demonstrations; their lengths, where they can be measured."""
    data = settings.task.data
    try:
        roots = {"images_root": data.images, "image_roots": data.image_roots}
        opened = open_transcripts(data.demonstrations, **roots, ignored=data.columns.ignored)
    except ValueError as error:
        report.fail("data.demonstrations", str(error))
        return
    found = survey_transcripts(opened, check_length=make_length_check(settings, renderer) if renderer else None)
    learned = f"{found.num_replies - found.num_masked} of {found.num_replies} replies learned"
    report.say("data.demonstrations", f"{found.num_rows} conversations, {found.num_images} images, {learned}")
    report.errors += [f"task.data.demonstrations: {line}" for line in found.errors]
    report.warnings += [f"task.data.demonstrations: {line}" for line in found.warnings]


def around_of(settings: Settings, task: Task, opened: Mapping[str, Questions], renderer: Renderer) -> int:
    """What the task writes around its questions, as a run measures it (preflight/prompts.py): by the first one. 0 where that cannot be
    shown."""
    if settings.task.name not in USES_DATA or not opened:
        return 0
    try:
        example = next(iter(opened.values()))[0]
    except ValueError:  # it is told with all other rows
        return 0
    prompt = asyncio.run(render_prompt(task, example, renderer, seed=0))
    return 0 if prompt is None else around(example, prompt, settings, renderer)


def look_at_misfits(prompts: Prompts, report: Report, *, split: str, num: int, told: str) -> None:
    """Whether a run plays enough of the first `num` rows of a split."""
    try:
        prompts.require_played(split, num=num, told=told)
    except ValueError as error:
        report.errors.append(str(error))


def tell_questions(found: Survey, report: Report, *, split: str, longest: int | None) -> None:
    sources = ", ".join(f"{source or '(no source)'} {count}" for source, count in found.sources.most_common())
    length = "" if longest is None else f", longest question {longest} tokens"
    report.say(f"data.{split}", f"{found.num_rows} rows, {found.num_images} images{length}; {sources}")
    warnings = [*found.column_warnings, *found.unread, *found.warnings]
    for kept, lines, num_more in (
        (report.errors, found.errors, found.num_more_errors),
        (report.warnings, warnings, found.num_more_warnings),
    ):
        kept += [line if line.startswith("task.data.") else f"task.data.{split}: {line}" for line in lines]
        kept += [f"task.data.{split}: and {num_more} more rows"] if num_more else []
    unknown = [source for source in found.sources if source and not is_known(source)]
    if unknown:
        told = "no rule of its own; its answers are compared as text, number, choice and mathematics, then by a judge"
        report.warnings.append(f"task.data.{split}: data_source {', '.join(unknown)}: {told}")


def is_known(source: str) -> bool:
    return family(source.casefold()) != "general" or source.casefold().endswith(NUMERIC_SOURCES)


def look_at_judges(settings: Settings, report: Report) -> None:
    """What a run will think of its judges when it starts: a server answers, and serves the model that is asked for."""
    try:
        greetings = asyncio.run(_greet_judges(settings.task.judge))
        for url, greeting in greetings.items():
            served = f"serves {', '.join(greeting.served)}" if greeting.served else "answers, and does not list its models"
            report.say(f"judge {url}", "not usable" if greeting.trouble else served)
        warning = health_warning(greetings)
    except InfraError as fault:
        report.errors.append(str(fault))
    else:
        report.warnings += [warning] if warning else []


async def _greet_judges(judge: JudgeSettings) -> dict[str, HealthCheck]:
    async with AsyncExitStack() as opened:
        secret, urls = api_key(judge.token_file), [url for url in dict.fromkeys(judge.urls) if not service_of(url)]
        clients = {url: await opened.enter_async_context(make_client(url, secret=secret)) for url in urls}
        return await check_endpoints(clients, model=judge.model, secret=secret, token_file=judge.token_file)


def look_at_sandbox(settings: Settings, report: Report) -> None:
    """The server answers, or this machine can wall code in."""
    chosen = settings.task.sandbox
    if settings.task.name not in USES_SANDBOX or service_of(chosen.url):
        return
    if chosen.url:
        try:
            asyncio.run(_greet_sandbox(chosen))
        except sandbox.AccessDenied as denied:
            report.fail("sandbox", f"task.sandbox.url={denied}: task.sandbox.token_file=FILE")
        except (sandbox.SandboxFault, sandbox.BoxClosed, sandbox.PoolFull, ValueError) as fault:  # a page that is not there is BoxClosed
            report.fail("sandbox", f"task.sandbox.url={chosen.url}: {one_line(fault)}; start it: python -m sandbox serve")
        else:
            report.say("sandbox", chosen.url)
        return
    layers, walled = sandbox.doctor.report(accept=chosen.allow_missing)
    report.warnings += [line.removeprefix("warning: ") for line in sandbox.doctor.exposed(own_paths(settings))]
    if chosen.isolation == "none":
        report.warnings.append("task.sandbox.isolation=none: the policy's code runs without any wall; use auto")
    elif not walled:
        report.fail("sandbox", f"task.sandbox.isolation={chosen.isolation}: {layers.splitlines()[-1]}; python -m sandbox doctor shows all")
        return
    report.say("sandbox", f"{layers.count(' in use ')} layers in use")


def own_paths(settings: Settings) -> dict[str, str]:
    """What a run reads and writes that no box is to see: its key -> path."""
    data = settings.task.data
    files = {
        f"task.data.{name}": paths for name, paths in (("train", data.train), ("eval", data.eval), ("demonstrations", data.demonstrations))
    }
    given = {f"{key}[{place}]": path for key, paths in files.items() for place, path in enumerate(paths) if os.path.exists(path)}
    images = {"task.data.images": data.images} if data.images else {}
    return {"the source": sandbox.layers.SOURCE, "run.dir": settings.run.dir, **given, **images}


def look_at_wandb(settings: Settings, report: Report) -> None:
    """A run that shows itself online has a key."""
    try:
        check_wandb(settings.wandb)
    except ValueError as error:
        report.fail("wandb", str(error))
    else:
        report.say("wandb", settings.wandb.mode)
    try:
        check_trackio(settings.trackio)
    except ValueError as error:
        report.fail("trackio", str(error))


async def _greet_sandbox(chosen: SandboxSettings) -> None:
    client = sandbox_client(chosen)
    try:
        await client.start()
    finally:
        await client.close()


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def examine(settings: Settings, own: Plugins = Plugins()) -> Report:
    report = Report()
    look_at_machine(settings, report)
    renderer, trunk = look_at_model(settings, report), settings.critic.path
    if (not trunk or look_at_folder(trunk, report, key="critic.path")) and renderer is not None:
        look_at_plan(settings, report, own)
    task = look_at_task(settings, report, own)
    look_at_data(settings, report, renderer=renderer, task=task)
    report.warnings += mismatch_warnings(settings)
    look_at_engines(settings, report)
    look_at_services(settings, report)
    look_at_judges(settings, report)
    look_at_sandbox(settings, report)
    look_at_wandb(settings, report)
    return report


def examine_and_show(settings: Settings, own: Plugins) -> int:
    """Print a table, and a line for each problem: `error: key=value: remedy`. 0: a run can start; 1: it cannot. On all ranks of a job."""
    world = read_world()
    report = examine(settings, own) if world.size == 1 else examine_together(settings, world, lambda: examine(settings, own))
    look_at_time(settings, report)
    if world.is_main:
        show(report, Console())
        print("a run cannot start" if report.errors else "a run can start")
    return 1 if report.errors else 0
