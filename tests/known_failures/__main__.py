"""Writes docs/known_failures.md from the table of failures and the markers in the tests.

    python -m tests.known_failures            # write the page
    python -m tests.known_failures --check    # exit code 1: the page is out of date

A test states what it catches: `@pytest.mark.known_failure("NAME")`, with a name of the table in
tests/known_failures/table.py. tests/contracts/test_known_failures.py keeps table, markers and page
in step.
"""

import argparse
import re
import sys
from collections.abc import Iterable

from tests.known_failures.failure import Failure
from tests.known_failures.markers import ROOT, MarkedTest, find_marked_tests
from tests.known_failures.table import SECTIONS

DOCUMENT = ROOT / "docs" / "known_failures.md"
REPOSITORIES = {
    "AReaL": "areal-project/AReaL",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "DeepEyes": "Visual-Agent/DeepEyes",
    "EasyR1": "hiyouga/EasyR1",
    "LlamaFactory": "hiyouga/LlamaFactory",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NeMo-Gym": "NVIDIA-NeMo/Gym",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "Qwen3-VL": "QwenLM/Qwen3-VL",
    "ROLL": "alibaba/ROLL",
    "Search-R1": "PeterGriffinJin/Search-R1",
    "SkyRL": "NovaSky-AI/SkyRL",
    "ToRL": "GAIR-NLP/ToRL",
    "datasets": "huggingface/datasets",
    "miles": "radixark/miles",
    "ms-swift": "modelscope/ms-swift",
    "open-instruct": "allenai/open-instruct",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pytorch-lightning": "Lightning-AI/pytorch-lightning",
    "rllm": "rllm-org/rllm",
    "sglang": "sgl-project/sglang",
    "slime": "THUDM/slime",
    "tinker-feedback": "thinking-machines-lab/tinker-feedback",
    "trl": "huggingface/trl",
    "unsloth": "unslothai/unsloth",
    "verl": "verl-project/verl",
    "vllm": "vllm-project/vllm",
}
"""Repositories on GitHub of the names in reports. Reports of other names have no link."""
INTRODUCTION = """# Known failures

<!-- Written by `python -m tests.known_failures`. Edit tests/known_failures/, not this page. -->

This page lists {count} failures that users of trainers and engines for vision-language models have
reported, what this program does in the same situation, and the tests that fail if it has the
failure. Most of these failures raise no error: training goes on with wrong data.

Each test has a marker with the name of the failure, and the page is generated from these markers.
At least one test of each row runs in CI without a GPU. Tests in parentheses need more, as stated.
A report may be fixed by now; it is cited for its symptom. The page does not claim that the cause is
the same. [Numerics](numerics.md) has the tolerances, [troubleshooting](troubleshooting.md) explains
the error messages, and [scope](scope.md) lists what was never run.
"""


def render_page(sections: dict[str, dict[str, Failure]], tests: Iterable[MarkedTest]) -> str:
    """Return the Markdown of the page."""
    tests_by_failure: dict[str, list[MarkedTest]] = {}
    for test in tests:
        tests_by_failure.setdefault(test.failure, []).append(test)
    parts = [INTRODUCTION.format(count=sum(map(len, sections.values())))]
    for title, failures in sections.items():
        rows = [_render_row(failure, tests_by_failure.get(name, [])) for name, failure in failures.items()]
        parts.append("\n".join([f"## {title}", "", "| symptom | seen in | here | tests |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _render_row(failure: Failure, tests: list[MarkedTest]) -> str:
    here = f"{failure.here} [More]({failure.guide})" if failure.guide else failure.here
    return f"| {failure.symptom} | {_link_reports(failure.seen)} | {here} | {', '.join(map(_render_test, tests))} |"


def _render_test(test: MarkedTest) -> str:
    link = f"[`{test.test}`](../{test.file})"
    return f"({link}: {', '.join(test.restrictions)})" if test.restrictions else link


def _link_reports(seen: str) -> str:
    """Return the reports, with links to those in known repositories."""

    def link(found: re.Match[str]) -> str:
        repository = REPOSITORIES.get(found["name"])
        return f"[{found[0]}](https://github.com/{repository}/issues/{found['number']})" if repository else found[0]

    return re.sub(r"(?P<name>[\w.-]+)#(?P<number>\d+)", link, seen)


def main() -> int:
    """Write the page, or compare it with --check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], prog="python -m tests.known_failures")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    page = render_page(SECTIONS, find_marked_tests())
    if not parser.parse_args().check:
        DOCUMENT.write_text(page)
        return 0
    if DOCUMENT.is_file() and DOCUMENT.read_text() == page:
        return 0
    sys.stderr.write("error: docs/known_failures.md is out of date; run python -m tests.known_failures\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
