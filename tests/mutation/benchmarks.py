"""Mutants of benchmarks/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "code that the driver would compile is removed",
        "benchmarks/gpu/slices.py",
        "entry.architecture <= architecture]",
        "entry.architecture > architecture]",
        "tests/benchmarks/test_gpu_hour.py -k other_architectures",
    ),
    Mutant(
        "the key of a sample of sentences has the order of the folders",
        "benchmarks/prose_sample.py",
        '{folder}\\n" for number, (folder, _, _) in enumerate(drawn, 1)',
        '{folder}\\n" for number, (folder, _, _) in enumerate(sorted(drawn), 1)',
        "tests/benchmarks/test_prose_sample.py -k key_names",
    ),
    Mutant(
        "an agent's episode without a positive return is a success",
        "benchmarks/agent_frameworks.py",
        "statistics.fmean(reward > 0 for reward in rewards)",
        "statistics.fmean(reward >= 0 for reward in rewards)",
        "tests/benchmarks/test_benchmarks.py -k agent_frameworks_table",
    ),
    Mutant(
        "an undecided answer counts as decided",
        "benchmarks/published_scores.py",
        "if credit is not None:",
        "if credit is not False:",
        "tests/benchmarks/test_published_scores.py -k hand_made",
    ),
    Mutant(
        "a row with an unknown verdict of DynaMath is read",
        "benchmarks/published_files.py",
        "if unknown or len(verdicts) < NUM_VARIANTS",
        "if len(verdicts) < NUM_VARIANTS",
        "tests/benchmarks/test_published_scores.py -k one_line_each",
    ),
    Mutant(
        "a finished part of an agent's cell is run again",
        "benchmarks/agent_frameworks.py",
        "if (folder / result).exists():",
        "if (folder / result).is_dir():",
        "tests/benchmarks/test_benchmarks.py -k agent_frameworks_resume",
    ),
    Mutant(
        "a figure that is not a number lies inside of its band",
        "benchmarks/gates/figures.py",
        "return self.low <= value <= self.high",
        "return not (value < self.low or value > self.high)",
        "tests/benchmarks/test_gates.py -k fault_is_named",
    ),
    Mutant(
        "a band is a confidence interval of the mean",
        "benchmarks/gates/figures.py",
        "math.sqrt(1 + 1 / num)",
        "math.sqrt(1 / num)",
        "tests/benchmarks/test_gates.py -k prediction_interval",
    ),
    Mutant(
        "a run outside of its bands passes",
        "benchmarks/gates/__main__.py",
        "return int(bool(outside))",
        "return 0",
        "tests/benchmarks/test_gates.py -k fault_is_named",
    ),
    Mutant(
        "a run of another length is compared",
        "benchmarks/gates/history.py",
        "num_steps == expected,",
        "num_steps > 0,",
        "tests/benchmarks/test_gates.py -k one_line",
    ),
    Mutant(
        "the majority answer is read from one training picture",
        "benchmarks/geometry.py",
        'read_lines(data / "train.jsonl")',
        'read_lines(data / "train.jsonl")[:1]',
        "tests/benchmarks/test_benchmarks.py -k geometry_tables",
    ),
)
