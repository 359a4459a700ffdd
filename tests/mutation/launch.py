"""Mutants of launch/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a node that fails leaves the others to their timeout",
        "launch/slurm/nodes.sh",
        " --kill-on-bad-exit=1",
        "",
        "tests/cli/test_slurm_scripts.py -k each_node",
    ),
    Mutant(
        "all jobs meet at one port",
        "launch/slurm/nodes.sh",
        "$((20000 + SLURM_JOB_ID % 10000))",
        "29500",
        "tests/cli/test_slurm_scripts.py -k ports",
    ),
    Mutant(
        "a job loses the words of its attempts",
        "launch/slurm/train.sbatch",
        'launch/attempt.py "${own[@]}" --',
        "launch/attempt.py --",
        "tests/cli/test_slurm_scripts.py -k job_of_training",
    ),
    Mutant(
        "a half that has ended is not noticed",
        "launch/lewis_pair.sh",
        "        exit $((code == 75 ? 75 : 1))",
        "        num_runs=$((num_runs - 1))",
        "tests/services/test_lewis_launcher.py -k half_that_ends",
    ),
    Mutant(
        "a pair ends while its halves do not",
        "launch/lewis_pair.sh",
        '        if ! kill -0 "${!names[@]}" 2>/dev/null; then return; fi',
        "        return",
        "tests/services/test_lewis_launcher.py -k half_that_ends",
    ),
    Mutant(
        "a finished half's service forgets",
        "launch/lewis_pair.sh",
        "model=$out/$1/final; fi",
        "model=$2; fi",
        "tests/services/test_lewis_launcher.py -k finished",
    ),
)
