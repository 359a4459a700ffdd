"""Instructions in the documents are valid: every command parses, every setting exists, every link
has a target.

Parsed: all commands of all documents, by the parser of the program that each command starts
(tests/support/documented_commands.py). A parsed command starts nothing.

Executed, of the README: the commands in `EXECUTED`, which take seconds. tests/e2e/test_readme_code.py
runs the files that the README prints, with their commands.

Only parsed, of the README: what installs, downloads, needs a GPU or takes minutes. `.ci/run` executes
launch/quickstart.sh and tests/run.sh, and tests/e2e/test_train.py runs the quickstart's recipes.
"""

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from megatron_rl.cli.help import DOCTOR_USAGE, TRAIN_USAGE
from megatron_rl.config import Settings
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.documented_commands import InvalidCommand, check_command, entry_points, extract_commands, module_docs, split_words

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "sandbox/README.md",
    "benchmarks/gpu/README.md",
    "examples/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")),
]
SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for room in ("benchmarks", "examples", "launch", "tools") for path in (ROOT / room).rglob("*.py")
)

HELP = {"launch/train.py --help": TRAIN_USAGE, "launch/doctor.py --help": DOCTOR_USAGE}


def text_of(name: str) -> str:
    """Return the text of a document, the module docstring of a script, or the output of a script's
    --help.
    """
    if name in HELP:
        return HELP[name]
    path = ROOT / name
    return module_docs(path) if path.suffix == ".py" else path.read_text()


PRINTED = [(name, line) for name in [*DOCUMENTS, *SCRIPTS, *HELP] for line in extract_commands(text_of(name))]


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Commands that have passed: one that several documents print is checked once."""
    return set()


@pytest.mark.parametrize(("name", "line"), PRINTED, ids=lambda text: " ".join(text.split("#")[0].split()))
def test_a_command_parses(name: str, line: str, valid: set[str], pytestconfig: pytest.Config) -> None:
    command = shlex.join(split_words(line))
    if command not in valid:
        check_command(line, pytestconfig)
        valid.add(command)


def test_commands_are_found() -> None:
    least = {"README.md": 5, "docs/cluster.md": 12, "docs/agents.md": 10, "docs/converters.md": 4, "sandbox/README.md": 4}
    least["examples/README.md"] = 9
    least |= dict.fromkeys(HELP, 3)
    assert not [name for name, count in least.items() if sum(document == name for document, _ in PRINTED) < count]


WITHIN_100_COLUMNS = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "SECURITY.md", "docs/source_tree.md"]


def find_long_lines(text: str) -> list[str]:
    return [f"{row}: {len(line)} columns" for row, line in enumerate(text.splitlines(), start=1) if len(line) > 100]


@pytest.mark.parametrize("name", WITHIN_100_COLUMNS)
def test_lines_have_at_most_100_columns(name: str) -> None:
    assert not find_long_lines(text_of(name))


def test_a_long_line_is_noticed() -> None:
    assert find_long_lines("short\n" + 100 * "x" + "\n" + 101 * "x") == ["3: 101 columns"]


def test_the_readme_activates_the_environment_before_it_is_needed() -> None:
    text = (ROOT / "README.md").read_text()
    needing = [line for line in extract_commands(text) if split_words(line)[0] in ("torchrun", "python", *entry_points())]
    printed = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert split_words(printed[printed.index(needing[0]) - 1])[:2] == ["source", ".venv/bin/activate"]


EXECUTED = {
    "python launch/train.py --help": ("", "experiment=alfworld_grpo_cpu"),
    "python launch/train.py --help optim": ("", "optim.lr=1e-06"),
    "python launch/doctor.py experiment=numberline_grpo_cpu": ("model.path={model} run.dir={folder}/run", "a run can start"),
    "python launch/train.py experiment=codev_7b_h200x8 plan.only=true": ("", "fits: "),
    "python benchmarks/gpu/first_hour.py --part 1 --out results": ("--out {folder} --only matches_no_step", "| step |"),
}
"""Maps each command of the README that is executed to the arguments added here and a part of its
output. The doctor's model is replaced, because the quickstart trains the README's. first_hour.py
reads its arguments and selects no step.
"""


@pytest.mark.parametrize("line", EXECUTED)
def test_a_command_of_the_readme_runs(line: str, random_model: Path, tmp_path: Path) -> None:
    """The command is printed in the README, exits with 0 and prints what is expected."""
    added, expected = EXECUTED[line]
    assert line in extract_commands(text_of("README.md"))
    _, *words = shlex.split(f"{line} {added.format(model=random_model, folder=tmp_path)}")
    result = fork_server.run_script(*words, cwd=ROOT, timeout_s=120)
    assert result.returncode == 0, result.stdout
    assert expected in result.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu algo.lr=1e-3", "Could not override 'algo.lr'"),
        ("torchrun --nproc_per_node 2 launch/train.py experiment=numberline_grpo_cpu optim.lr=-1", "must be a finite, non-negative number"),
        ("torchrun --nproc_per_node 2 launch/train.py experiment=no_such_one", "no_such_one"),
        ("torchrun --nproc_per_knot 2 launch/train.py experiment=numberline_grpo_cpu", "nproc_per_knot|required"),
        ("python launch/train.py run.dir=there", "model.path="),
        ("python launch/train.py experiment=numberline_grpo_cpu --cgf job", "cgf"),
        ("python examples/own_reward.py run.stpes=3", "run.stpes"),
        ("python examples/lora_and_export.py lora.rnak=3", "lora.rnak"),
        ("python examples/evaluate_and_compare.py --sample_count 3", "sample_count"),
        ("python examples/inspect_rollouts.py runs/a runs/b", "takes one folder"),
        ("launch/train.py experiment=numberline_grpo_cpu", "launch/train.py: cannot be started as printed"),
        ("python launch/trian.py experiment=numberline_grpo_cpu", "no such file"),
        ("python tools/convert/compare.py one_folder", "compare: the following arguments are required"),
        ("python tools/convert/merge_run.py --run RUN --out merged --layers 3", "--layers"),
        ("python benchmarks/convert.py --sizes 3B --folder runs/convert --layers two", "--layers"),
        ("merger --checkpoint RUN/checkpoints/step_00000050", "--out"),
        ("python -m megatron_rl_sandbox serve --prot 8080", "--prot"),
        ("python -m megatron_rl_sandbox surf", "surf"),
        ("bash launch/quickstart.sh run.sede=1", "run.sede"),
        ("bash launch/lewis.sh localhost 9000 4 data/lewis 23 model.pth=7b", "model.pth"),
        ("bash launch/lewis.sh localhost data/lewis 4 9000 23", "are numbers"),
        ("bash launch/lewis_pair.sh together a b runs/pair", "no way to train two"),
        ("bash launch/lewis_pair.sh alternating a b runs/pair run.stpes=3", "run.stpes"),
        ("source .venv/bin/activated", "activated"),
        ("bash launch/slowstart.sh", "cannot be started"),
        ("bash launch/install.sh --fast", "no kind of machine"),
        ("bash launch/install_slurm.sh --fast", "takes no arguments"),
        ("bash tests/run.sh tests/unit -k losses", "tests/unit: no such test"),
        ("bash tests/run.sh --quck", "--quck"),
        ("sbatch --array=0-3 launch/slurm/swep.sbatch launch/slurm/example.yaml", "cannot be started"),
        ("sbatch --array=0-3 launch/slurm/sweep.sbatch launch/slurm/exemple.yaml", "exemple.yaml: no such file"),
        ("sbatch --array=0-3 launch/slurm/sweep.sbatch launch/slurm/example.yaml --requeued", "--requeued"),
        ("sbatch --nodes=2 launch/slurm/train.sbatch --requeue experiment=no_such_one", "no_such_one"),
        ("python launch/submit.py experiment=numberline_grpo_cpu slurm.node=2 -- --exclusive", "slurm.node"),
        ("squeue --my", "squeue --my: is not"),
    ],
)
def test_a_planted_mistake_is_noticed(line: str, said: str, pytestconfig: pytest.Config) -> None:
    with pytest.raises(InvalidCommand, match=said):
        check_command(line, pytestconfig)


def test_a_block_with_a_command_has_nothing_else() -> None:
    """A block with a command contains only commands, so a misspelled program name is an error and
    not skipped as prose.
    """
    text = "Run:\n\n    pyhton launch/train.py\n    # all\n    bash tests/run.sh\n\nor `bash launch/install.sh`.\n\n    box = pool.open()\n"
    assert extract_commands(text) == ["pyhton launch/train.py", "bash tests/run.sh", "bash launch/install.sh"]
    with pytest.raises(InvalidCommand, match="pyhton"):
        check_command("pyhton launch/train.py", None)


def keys(settings: object, prefix: str = "") -> set[str]:
    """Return the dotted names of all settings and groups of settings."""
    found = set()
    for field in fields(settings):
        value = getattr(settings, field.name)
        found |= {prefix + field.name} | (keys(value, f"{prefix}{field.name}.") if is_dataclass(value) else set())
    return found


GROUPS = [field.name for field in fields(Settings) if field.name != "stage"]
NAMED = re.compile(rf"(?<![\w./])((?:{'|'.join(GROUPS)})(?:\.[a-z_0-9]+)+)(?![\w(/])")


def is_named_rightly(name: str) -> bool:
    """Return True if the name is a setting, or a file of this repository or of a run directory."""
    return (
        name.startswith("task.options.")
        or name in keys(Settings())
        or name.rpartition(".")[0] == "optim.lr_by_module"
        or name.rpartition(".")[2] in ("py", "md", "yaml", "json", "jsonl", "sh", "onnx")
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_setting_that_is_named_exists(name: str) -> None:
    """Every name that starts like a group of settings is an existing setting or file."""
    assert not [named for named in NAMED.findall(text_of(name)) if not is_named_rightly(named)]


def test_a_setting_that_moved_is_noticed() -> None:
    said = "`optim.lr_by_module={vision:1e-7}`, `algo.lr`, `RUN/run.json`, run.py and task.data.trian=[x]"
    assert [named for named in NAMED.findall(said) if not is_named_rightly(named)] == ["algo.lr", "task.data.trian"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_link_leads_somewhere(name: str) -> None:
    text = text_of(name)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)
    assert not [link for link in links if not link.startswith("http") and not ((ROOT / name).parent / Path(link)).exists()]


def test_a_named_link_is_defined() -> None:
    """Every `[text][name]` of the README has a line `[name]: target`, and each line is used."""
    text = text_of("README.md")
    used, defined = set(re.findall(r"\]\[(\w+)\]", text)), re.findall(r"^\[(\w+)\]: ", text, re.MULTILINE)
    assert used == {*defined} and len(defined) == len(used)
