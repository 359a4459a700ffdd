"""Mutants of megatron_rl/launcher/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "another key changes what is drawn",
        "megatron_rl/launcher/sweep_file.py",
        "generators = {key: random.Random(f\"{given['seed']} {key}\") for key in keys}",
        "generators = dict.fromkeys(keys, random.Random(given['seed']))",
        "tests/launcher/test_sweep_file.py -k repeat",
    ),
    Mutant(
        "a sweep begins before all of it is composed",
        "megatron_rl/launcher/sweep.py",
        "        settings = compose_tasks(sweep.tasks)\n",
        "        settings = {task.index: compose_tasks([task])[0] for task in tasks}\n",
        "tests/launcher/test_sweep.py -k composed",
    ),
    Mutant(
        "a sweep that was asked to stop begins the next run",
        "megatron_rl/launcher/sweep.py",
        "while waiting and len(self._running) < max_parallel and not signals.received:",
        "while waiting and len(self._running) < max_parallel:",
        "tests/launcher/test_sweep.py -k stopped",
    ),
    Mutant(
        "a finished run of a sweep begins again",
        "megatron_rl/launcher/sweep.py",
        "if not stand.is_finished]",
        "if stand]",
        "tests/launcher/test_sweep.py -k finished",
    ),
    Mutant(
        "a launcher kills ranks while they save",
        "megatron_rl/launcher/spawn.py",
        "parse_grace_s(given.training_script_args) + CLOSE_TIMEOUT_S",
        "parse_grace_s(given.training_script_args)",
        "tests/launcher/test_spawn.py -k time_to_close",
    ),
    Mutant(
        "a process that died of a signal has exit code 1",
        "megatron_rl/launcher/spawn.py",
        "else 128 - exitcode",
        "else 1",
        "tests/launcher/test_spawn.py -k last_line",
    ),
    Mutant(
        "an interval is that of a greedy evaluation always",
        "megatron_rl/launcher/sweep_report.py",
        "found = success_interval(evaluation, kind)",
        'found = success_interval(evaluation, "greedy")',
        "tests/launcher/test_sweep.py -k wilsons",
    ),
)
