"""Checks everything that a run needs, on the machine that will run it (launch/doctor.py)."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

from rich.console import Console

import megatron_rl_sandbox as sandbox
from megatron_rl.algo.rollout_correction import mismatch_warnings
from megatron_rl.clients.health_check import HealthCheck, check_endpoints, health_warning
from megatron_rl.clients.openai import api_key, make_client
from megatron_rl.clients.sandbox_service import make_sandbox_client
from megatron_rl.config import JudgeSettings, SandboxSettings, Settings, service_of
from megatron_rl.data.benchmarks.catalog import open_benchmark_questions
from megatron_rl.data.prompt_lengths import PromptLengthChecker, measure_prompt_overhead
from megatron_rl.data.questions import QuestionDataset
from megatron_rl.data.survey import QuestionSurvey, survey_questions
from megatron_rl.data.transcript_survey import make_length_check
from megatron_rl.data.transcripts import ANSWERS_SPLIT, TRANSCRIPTS_SPLIT, open_transcripts, survey_transcripts
from megatron_rl.distributed.world import read_world
from megatron_rl.dtypes import resolve_dtypes
from megatron_rl.errors import InfraError
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.metrics import check_trackio, check_wandb
from megatron_rl.preflight.check_report import CheckReport, print_report
from megatron_rl.preflight.doctor_job import check_time_left, run_checks_on_nodes
from megatron_rl.preflight.doctor_machine import check_machine, check_memory_plan
from megatron_rl.preflight.doctor_services import check_engine_servers, check_services
from megatron_rl.preflight.run_checks import resolve_epochs
from megatron_rl.registry import Plugins, build_task
from megatron_rl.rewards.accuracy import find_example_family
from megatron_rl.rewards.answer import NUMERIC_SOURCES
from megatron_rl.rollout.manager import render_prompt
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Task
from megatron_rl.weights.formats.expert_layouts import fuse_experts
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl_sandbox import host_report
from megatron_rl_sandbox.layers import SOURCE_DIR

SANDBOX_TASKS = ("visual_python", "visual_search")
"""Names of the tasks that may run code in a sandbox."""
DATA_TASKS = ("visual_python", "vqa")
"""Names of the tasks that read the user's own data."""
DATA_OF_SPLITS = {TRANSCRIPTS_SPLIT: "demonstrations", ANSWERS_SPLIT: "train"}
"""Maps a demonstration split of a task with data to the setting in task.data that it reads."""


def check_model(settings: Settings, report: CheckReport) -> Renderer | None:
    """Check the model's directory, tokenizer and processor.

    Return the renderer, or None if the directory, the tokenizer or the processor is unusable.
    Without a renderer, the length of prompts cannot be checked.
    """
    if not check_model_folder(settings.model.path, report, key="model.path"):
        return None
    try:
        return Renderer(settings.model, allow_grounding_tokens=settings.task.data.allow_grounding_tokens)
    except (ValueError, OSError) as error:
        report.add_failure("tokenizer", folder_error_line(error, settings.model.path, key="model.path"))
        return None


def check_model_folder(path: str, report: CheckReport, *, key: str) -> bool:
    """Return True if the model's config and the headers of all its tensors can be read."""
    try:
        spec = read_spec(path, key=key)
        stored = fuse_experts(HfTensors(path, key=key), spec.shapes()).specs
    except (ValueError, OSError) as error:
        report.add_failure(key, folder_error_line(error, path, key=key))
        return False
    absent = sorted(spec.shapes().keys() - stored.keys())
    if absent:
        report.add_failure(key, f"{key}={path}: lacks {absent[0]} and {len(absent) - 1} more tensors; download it again")
        return False
    report.add_finding(key, f"{path}: {spec.num_layers} layers of {spec.hidden_size}, {len(stored)} tensors")
    return True


def folder_error_line(error: Exception, path: str, *, key: str) -> str:
    """Return an error as one line that starts with the setting and the path."""
    return str(error) if str(error).startswith(key) else f"{key}={path}: {error_line(error)}"


def check_task(settings: Settings, report: CheckReport, plugins: Plugins) -> Task | None:
    """Return the task built from its settings, or None if the settings are invalid."""
    try:
        task = build_task(settings.task, plugins)
    except ValueError as error:
        report.add_failure("task", str(error))
        return None
    report.add_finding("task", settings.task.name)
    return task


def find_required_data(settings: Settings, task: Task | None) -> list[str]:
    """Return the settings in task.data that a stage of a task with data needs."""
    if settings.task.name not in DATA_TASKS:
        return []
    if settings.stage == "rl":
        return ["train", "eval"]
    splits = settings.sft.splits or ([task.default_demonstration_split()] if task else [])
    return [*dict.fromkeys(DATA_OF_SPLITS[split] for split in splits if split in DATA_OF_SPLITS), "eval"]


def check_data(settings: Settings, report: CheckReport, *, renderer: Renderer | None, task: Task | None) -> None:
    """Check every row in all data files of the run."""
    data = settings.task.data
    given = {"train": data.train, "eval": data.eval, "demonstrations": data.demonstrations}
    for split in [split for split in find_required_data(settings, task) if not given[split]]:
        if not any(line.startswith(f"task.data.{split}=") for line in report.errors):  # the task may have reported it already
            report.add_failure(f"data.{split}", f"task.data.{split}=[]: give the files, JSON lists, JSON lines or Parquet")
    opened: dict[str, QuestionDataset] = {}
    for split in ("train", "eval"):
        try:
            if given[split]:
                opened[split] = open_benchmark_questions(data, split)
        except ValueError as error:
            report.add_failure(f"data.{split}", str(error))
    beside = measure_overhead_tokens(settings, task, opened, renderer, report) if renderer and task else 0
    for split, questions in opened.items():
        prompts = PromptLengthChecker(settings, renderer, overhead_tokens=beside) if renderer else None
        found = survey_questions(questions, check_question=prompts.check_question if prompts else None)
        report_questions(found, report, split=split, longest=prompts.max_prompt_tokens if prompts else None)
        report.warnings += [f"task.data.{split}: {line}" for line in prompts.pixel_warnings()] if prompts else []
        if prompts is not None and settings.stage == "rl":  # SFT needs prompts only for evaluation, and starts even if they do not fit
            num = (split == "eval" and data.max_eval) or len(questions)
            check_prompts_fit(prompts, report, split=split, num=num, example_error="".join(found.warnings[:1]))
    if data.demonstrations:
        check_transcripts(settings, report, renderer=renderer)


def check_transcripts(settings: Settings, report: CheckReport, *, renderer: Renderer | None) -> None:
    """Check every row in the demonstration files, and the rows' lengths if there is a renderer."""
    data = settings.task.data
    try:
        roots = {"images_root": data.images, "image_roots": data.image_roots}
        opened = open_transcripts(data.demonstrations, **roots, ignored=data.columns.ignored)
    except ValueError as error:
        report.add_failure("data.demonstrations", str(error))
        return
    found = survey_transcripts(opened, check_length=make_length_check(settings, renderer) if renderer else None)
    learned = f"{found.num_replies - found.num_masked} of {found.num_replies} replies learned"
    report.add_finding("data.demonstrations", f"{found.num_rows} conversations, {found.num_images} images, {learned}")
    report.errors += [f"task.data.demonstrations: {line}" for line in found.errors]
    report.warnings += [f"task.data.demonstrations: {line}" for line in found.warnings]


def measure_overhead_tokens(
    settings: Settings, task: Task, questions_by_split: Mapping[str, QuestionDataset], renderer: Renderer, report: CheckReport
) -> int:
    """Return the number of tokens that the task's prompt adds to a question.

    As in a run, the number is measured with the first question (preflight/prompts.py). Return 0 if
    the question cannot be rendered. A prompt with the tools of MCP servers is reported.
    """
    if settings.task.name not in DATA_TASKS or not questions_by_split:
        return 0
    try:
        example = next(iter(questions_by_split.values()))[0]
    except ValueError:  # check_data reports the invalid row
        return 0
    try:
        prompt = asyncio.run(render_prompt(task, example, renderer, seed=0))
    except InfraError as fault:
        if settings.task.tools.mcp:
            report.add_failure("task.tools.mcp", str(fault))
        return 0  # check_data reports an image that cannot be opened
    overhead = measure_prompt_overhead(example, prompt, settings, renderer)
    if settings.task.tools.mcp:
        names = ", ".join(server.name for server in settings.task.tools.mcp)
        report.add_finding("task.tools.mcp", f"{names}: tools are listed; the text around a question has {overhead} tokens")
    return overhead


def check_prompts_fit(prompts: PromptLengthChecker, report: CheckReport, *, split: str, num: int, example_error: str) -> None:
    """Report an error if too few of the first `num` rows in a split fit into a sequence."""
    try:
        prompts.check_enough_fit(split, num=num, example_error=example_error)
    except ValueError as error:
        report.errors.append(str(error))


def report_questions(question_survey: QuestionSurvey, report: CheckReport, *, split: str, longest: int | None) -> None:
    """Add the results of a question survey to the report."""
    sources = ", ".join(f"{source or '(no source)'} {count}" for source, count in question_survey.sources.most_common())
    length = "" if longest is None else f", longest prompt {longest} tokens"
    report.add_finding(f"data.{split}", f"{question_survey.num_rows} rows, {question_survey.num_images} images{length}; {sources}")
    warnings = [*question_survey.column_warnings, *question_survey.unread_columns, *question_survey.warnings]
    for kept, lines, num_more in (
        (report.errors, question_survey.errors, question_survey.num_more_errors),
        (report.warnings, warnings, question_survey.num_more_warnings),
    ):
        kept += [line if line.startswith("task.data.") else f"task.data.{split}: {line}" for line in lines]
        kept += [f"task.data.{split}: and {num_more} more rows"] if num_more else []
    unknown = [source for source in question_survey.sources if source and not has_scoring_rule(source)]
    if unknown:
        told = "has no specific rule; its answers are compared as text, number, choice and mathematics, then by a judge"
        report.warnings.append(f"task.data.{split}: data_source {', '.join(unknown)}: {told}")


def has_scoring_rule(source: str) -> bool:
    """Return True if a data source has its own worked examples or a numeric scoring rule."""
    return find_example_family(source.casefold()) != "general" or source.casefold().endswith(NUMERIC_SOURCES)


def check_judges(settings: Settings, report: CheckReport) -> None:
    """Check that the judge's servers respond and serve the requested model."""
    try:
        greetings = asyncio.run(_check_judge_endpoints(settings.task.judge))
        for url, greeting in greetings.items():
            served = f"serves {', '.join(greeting.models)}" if greeting.models else "responds, but does not list its models"
            report.add_finding(f"judge {url}", "not usable" if greeting.error else served)
        warning = health_warning(greetings)
    except InfraError as fault:
        report.errors.append(str(fault))
    else:
        report.warnings += [warning] if warning else []


async def _check_judge_endpoints(judge: JudgeSettings) -> dict[str, HealthCheck]:
    async with AsyncExitStack() as opened:
        secret, urls = api_key(judge.token_file), [url for url in dict.fromkeys(judge.urls) if not service_of(url)]
        clients = {url: await opened.enter_async_context(make_client(url, secret=secret)) for url in urls}
        return await check_endpoints(clients, model=judge.model, secret=secret, token_file=judge.token_file)


def check_sandbox(settings: Settings, report: CheckReport) -> None:
    """Check that the sandbox server responds, or that this machine can run sandboxed code."""
    chosen = settings.task.sandbox
    if settings.task.name not in SANDBOX_TASKS or service_of(chosen.url):
        return
    if chosen.url:
        try:
            asyncio.run(_check_sandbox_server(chosen))
        except sandbox.SandboxAccessDenied as denied:
            report.add_failure("sandbox", f"task.sandbox.url={denied}: set task.sandbox.token_file=FILE")
        except (sandbox.SandboxError, sandbox.BoxClosed, sandbox.PoolFull, ValueError) as fault:  # a 404 response raises BoxClosed
            remedy = "start it: python -m megatron_rl_sandbox serve"
            report.add_failure("sandbox", f"task.sandbox.url={chosen.url}: {error_line(fault)}; {remedy}")
        else:
            report.add_finding("sandbox", chosen.url)
        return
    layers, walled = host_report.make_report(allow_missing=chosen.allow_missing)
    report.warnings += [line.removeprefix("warning: ") for line in host_report.warn_exposed_paths(private_paths(settings))]
    if chosen.isolation == "none":
        report.warnings.append("task.sandbox.isolation=none: the policy's code runs without isolation; use auto")
    elif not walled:
        report.add_failure(
            "sandbox",
            f"task.sandbox.isolation={chosen.isolation}: {layers.splitlines()[-1]}; python -m megatron_rl_sandbox doctor shows all",
        )
        return
    report.add_finding("sandbox", f"{layers.count(' in use ')} isolation layers in use")


def private_paths(settings: Settings) -> dict[str, str]:
    """Return the paths that code in a sandbox must not be able to access, keyed by setting."""
    data = settings.task.data
    files = {
        f"task.data.{name}": paths for name, paths in (("train", data.train), ("eval", data.eval), ("demonstrations", data.demonstrations))
    }
    given = {f"{key}[{place}]": path for key, paths in files.items() for place, path in enumerate(paths) if os.path.exists(path)}
    images = {"task.data.images": data.images} if data.images else {}
    return {"the source": SOURCE_DIR, "run.dir": settings.run.dir, **given, **images}


def check_trackers(settings: Settings, report: CheckReport) -> None:
    """Check the settings and credentials for W&B and trackio."""
    try:
        check_wandb(settings.wandb)
    except ValueError as error:
        report.add_failure("wandb", str(error))
    else:
        report.add_finding("wandb", settings.wandb.mode)
    try:
        check_trackio(settings.trackio)
    except ValueError as error:
        report.add_failure("trackio", str(error))


async def _check_sandbox_server(chosen: SandboxSettings) -> None:
    client = make_sandbox_client(chosen)
    try:
        await client.start()
    finally:
        await client.close()


def error_line(error: Exception) -> str:
    """Return an error's type and message as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def check_epochs(settings: Settings, report: CheckReport, *, task: Task | None) -> None:
    """Report the number of steps that run.epochs results in, unless the data has errors."""
    if task is None or report.errors or settings.stage != "rl" or settings.run.epochs == 0:
        return
    try:
        report.add_finding("run.epochs", f"{settings.run.epochs:g}: {resolve_epochs(settings, task).run.steps} steps")
    except ValueError as error:
        report.add_failure("run.epochs", str(error))


def run_checks(settings: Settings, plugins: Plugins = Plugins()) -> CheckReport:
    """Run all of the doctor's checks on this machine."""
    report = CheckReport()
    check_machine(settings, report)
    renderer = check_model(settings, report)
    others = {"critic.path": settings.critic.path} if settings.critic.path else {}
    others |= {settings.distill.teacher_key(path): path for path in settings.distill.teacher_paths}
    usable = [check_model_folder(path, report, key=key) for key, path in others.items()]
    if all(usable) and renderer is not None:
        check_memory_plan(settings, report, plugins)
    task = check_task(settings, report, plugins)
    check_data(settings, report, renderer=renderer, task=task)
    check_epochs(settings, report, task=task)
    report.warnings += mismatch_warnings(settings)
    check_engine_servers(settings, report)
    check_services(settings, report)
    check_judges(settings, report)
    check_sandbox(settings, report)
    check_trackers(settings, report)
    return report


def run_doctor(settings: Settings, plugins: Plugins) -> int:
    """Run the checks, print the report, and return 0 if the run can start, else 1.

    Each problem is printed as `error: key=value: remedy`. Collective over all ranks of a job.
    """
    world = read_world()
    settings = resolve_dtypes(settings, on_gpu=settings.plan.world_size > 0 or None)
    report = (
        run_checks(settings, plugins) if world.size == 1 else run_checks_on_nodes(settings, world, lambda: run_checks(settings, plugins))
    )
    check_time_left(settings, report)
    if world.is_main:
        print_report(report, Console())
        print("a run cannot start" if report.errors else "a run can start")
    return 1 if report.errors else 0
