"""The command `megatron-rl`: one subcommand for each program of the project.

`python -m megatron_rl COMMAND` is the same, and so is `python launch/COMMAND.py` in a checkout.
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import megatron_rl
from megatron_rl.io.pipes import exit_with_reader

Arguments = Sequence[str]
EPILOG = """
Examples:

    megatron-rl train experiment=numberline_grpo_cpu run.dir=runs/mine
    megatron-rl launch --nproc_per_node 2 -m megatron_rl train experiment=numberline_grpo_cpu
    megatron-rl compare runs/evaluations/before runs/evaluations/after
    megatron-rl COMMAND --help
"""


def _use_settings(word: str) -> Callable[[Arguments], None]:
    """Return a command that takes settings: key=value."""

    def command(arguments: Arguments) -> None:
        from megatron_rl.cli import cli

        sys.argv[1:] = [word, *arguments]
        cli()

    return command


def _attempt(arguments: Arguments) -> int:
    from megatron_rl.launcher.attempt import main

    return main(arguments)


def _check(arguments: Arguments) -> int:
    from megatron_rl_tools.convert.compare import main

    return main(list(arguments))


def _compare(arguments: Arguments) -> int:
    from megatron_rl.cli.compare import main

    return main(arguments)


def _convert(arguments: Arguments) -> int:
    from megatron_rl_tools.convert.converter_hf_to_mcore import main

    return main(list(arguments))


def _explain(arguments: Arguments) -> int:
    from megatron_rl.cli.explain import main
    from megatron_rl.compat.startup import ignore_library_warnings

    ignore_library_warnings()
    return main(arguments)


def _export(arguments: Arguments) -> int:
    from megatron_rl.cli.export import main

    return main(arguments)


def _launch(arguments: Arguments) -> int:
    from megatron_rl.launcher.spawn import launch_processes

    return launch_processes(arguments)


def _merge(arguments: Arguments) -> int:
    from megatron_rl_tools.convert.merger import main

    return main(list(arguments))


def _submit(arguments: Arguments) -> int:
    from megatron_rl.launcher.slurm import submit_main

    return submit_main(arguments)


def _sweep(arguments: Arguments) -> int:
    from megatron_rl.launcher.sweep import sweep_main
    from megatron_rl.models.model_folder import LAUNCH_FOLDER

    return sweep_main(arguments, launch=LAUNCH_FOLDER)


def _sweep_report(arguments: Arguments) -> int:
    from megatron_rl.launcher.sweep_report import main

    return main(arguments)


def _viewer(arguments: Arguments) -> int:
    from megatron_rl.observe.viewer.__main__ import main

    return main(arguments)


COMMANDS: dict[str, tuple[Callable[[Arguments], int | None], str]] = {
    "train": (_use_settings("train"), "train a model"),
    "evaluate": (_use_settings("evaluate"), "evaluate a model on a task's examples"),
    "doctor": (_use_settings("doctor"), "check everything that a run needs, without starting it"),
    "launch": (_launch, "start the processes of a run, as torchrun does, with a graceful stop"),
    "compare": (_compare, "compare evaluations, with confidence intervals"),
    "viewer": (_viewer, "show curves and rollouts of runs in a browser"),
    "explain": (_explain, "analyze one recorded step of a run"),
    "rescore": (_use_settings("rescore"), "recompute the rewards of recorded rollouts"),
    "export": (_export, "convert the best recorded rollouts to transcripts for SFT"),
    "convert": (_convert, "convert a Hugging Face model to a Megatron checkpoint"),
    "merge": (_merge, "convert a Megatron checkpoint or an adapter to a Hugging Face model"),
    "check": (_check, "compare two model folders tensor by tensor"),
    "sweep": (_sweep, "run many runs that one YAML file defines"),
    "sweep-report": (_sweep_report, "print and plot the runs of a sweep"),
    "submit": (_submit, "submit a run as a Slurm job"),
    "attempt": (_attempt, "run a command as one attempt of a run, as in a Slurm job"),
    "serve": (_use_settings("serve"), "serve the model of a run, or start its external services"),
    "server-command": (_use_settings("server-command"), "print the command that starts an inference server"),
}
"""Maps each subcommand to its function and a summary."""
PRINTS_ONLY = ("compare", "sweep-report", "export", "check")
"""Commands without sockets; they end silently if the reader of their output ends (`... | head`)."""


def render_usage() -> str:
    """Return the text of `megatron-rl --help`."""
    lines = [f"  {name:15} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: megatron-rl COMMAND ...", "", "Commands:", *lines, EPILOG])


def main(arguments: Arguments | None = None) -> int:
    """Run the command line and return the exit code."""
    word, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if word in ("-h", "--help", "help"):
        print(render_usage())
        return 0
    if word in ("-V", "--version"):
        print(f"megatron-rl {megatron_rl.__version__}")
        return 0
    if word not in COMMANDS:
        closest = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {closest[0]}?" if closest else f"choose one of {', '.join(COMMANDS)}"
        told = f"did you mean: megatron-rl train {word} ...?" if "=" in word else hint
        print(f"error: {word}: no such command; {told}", file=sys.stderr)
        return 2
    with exit_with_reader() if word in PRINTS_ONLY else nullcontext():
        return COMMANDS[word][0](rest) or os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
