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
)
