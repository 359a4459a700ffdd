"""Renders the command-line reference without importing the scripts, which would import torch.

The text is the docstring of each script; the arguments are read from its calls of add_argument.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl_tools.docs.configuration import escape

ROOT = Path(__file__).resolve().parents[2]
PAGE = "command_line.md"
COMMANDS = {
    "Train": ("launch/train.py", "launch/launch.py", "launch/doctor.py"),
    "Evaluate and inspect": (
        "launch/evaluate.py", "launch/compare.py", "launch/rescore.py", "launch/export.py", "launch/explain.py",
        "megatron_rl/observe/viewer/__main__.py", "megatron_rl/observe/plot.py",
    ),
    "Servers": ("launch/serve.py", "launch/server_command.py", "megatron_rl/rewards/judge_attack_suite.py"),
    "Slurm and sweeps": ("launch/submit.py", "launch/sweep.py", "launch/sweep_report.py", "launch/attempt.py"),
    "Checkpoints": (
        "tools/convert/converter_hf_to_mcore.py", "tools/convert/merger.py", "tools/convert/merge_run.py", "tools/convert/compare.py",
    ),
    "Data and small models": (
        "tools/data/make_tiny_qwen2_5_vl.py", "tools/data/make_visual_search.py", "tools/data/make_easy_vqa.py",
        "tools/data/extract_images_from_parquet.py", "tools/data/make_alfworld.py", "tools/data/make_emoji.py", "tools/data/make_lewis.py",
    ),
}  # fmt: skip
"""Documented programs, by section."""
PARSERS = {
    "launch/attempt.py": "megatron_rl/launcher/attempt.py",
    "launch/compare.py": "megatron_rl/cli/compare.py",
    "launch/export.py": "megatron_rl/cli/export.py",
    "launch/explain.py": "megatron_rl/cli/explain.py",
    "launch/serve.py": "megatron_rl/cli/serve.py",
    "launch/submit.py": "megatron_rl/launcher/slurm.py",
    "launch/sweep.py": "megatron_rl/launcher/sweep.py",
    "launch/sweep_report.py": "megatron_rl/launcher/sweep_report.py",
}
"""Files that define the arguments of a program, where it is not the program itself."""
NAMES = {
    "megatron_rl/observe/viewer/__main__.py": "python -m megatron_rl.observe.viewer",
    "megatron_rl/observe/plot.py": "python -m megatron_rl.observe.plot",
    "megatron_rl/rewards/judge_attack_suite.py": "python -m megatron_rl.rewards.judge_attack_suite",
    "tools/convert/converter_hf_to_mcore.py": "converter_hf_to_mcore",
    "tools/convert/merger.py": "merger",
    "tools/data/extract_images_from_parquet.py": "extract_images_from_parquet",
}
HEADER = """# Command-line reference

This page lists the programs of this repository with their arguments. It is generated from the
docstrings and the argument parsers of the programs. `--help` prints the same information.

`train.py`, `doctor.py`, `evaluate.py`, `rescore.py`, `serve.py` and `server_command.py` take
settings (`key=value`) as arguments: see the configuration reference. `serve.py` with a run takes
the options in its table.

"""


@dataclass(slots=True, frozen=True)
class Argument:
    """One argument of a program."""

    flags: tuple[str, ...]
    metavar: str
    meaning: str
    is_required: bool


def read_constants(tree: ast.Module) -> dict[str, object]:
    """Return the string and number constants of a module, including those that it imports."""
    found: dict[str, object] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                found[name] = value
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(("megatron_rl", "tools", "sandbox")):
                path = ROOT / f"{module.replace('.', '/')}.py"
                if path.is_file() and any(each.name.isupper() for each in names):
                    inner = read_constants(ast.parse(path.read_text()))
                    found |= {each.name: inner[each.name] for each in names if each.name in inner}
    return found


def read_text(node: ast.expr | None, constants: Mapping[str, object]) -> str:
    """Return the value of a string expression; names of unknown values stay as they are."""
    match node:
        case None:
            return ""
        case ast.Constant(value=value):
            return str(value)
        case ast.Name(id=name):
            return str(constants.get(name, name))
        case ast.JoinedStr(values=values):
            return "".join(read_text(each, constants) for each in values)
        case ast.FormattedValue(value=value):
            return read_text(value, constants)
        case _:
            return ast.unparse(node)


def find_calls(node: ast.AST, constants: dict[str, object]) -> Iterator[tuple[ast.Call, dict[str, object]]]:
    """Yield the calls of add_argument in order, with the values of names at the call.

    A loop over a literal tuple is unrolled.
    """
    match node:
        case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=items)):
            for item in items:
                for inner in node.body:
                    yield from find_calls(inner, {**constants, name: read_text(item, constants)})
        case ast.Call(func=ast.Attribute(attr="add_argument")):
            yield node, constants
        case _:
            for child in ast.iter_child_nodes(node):
                yield from find_calls(child, constants)


def read_arguments(path: Path) -> list[Argument]:
    """Return the arguments that a file defines with add_argument."""
    tree = ast.parse(path.read_text())
    found = []
    for call, constants in find_calls(tree, read_constants(tree)):
        flags = tuple(read_text(each, constants) for each in call.args)
        given = {each.arg: each.value for each in call.keywords if each.arg}
        default = read_text(given.get("default"), constants)
        takes_value = "action" not in given and flags[0].startswith("-")
        metavar = read_text(given.get("metavar"), constants)
        if not metavar and takes_value:
            metavar = flags[-1].lstrip("-").replace("-", "_").upper()
        is_required = isinstance(given.get("required"), ast.Constant) and read_text(given["required"], constants) == "True"
        meaning = describe(read_text(given.get("help"), constants), default)
        if all(flag.isidentifier() or flag.startswith("-") for flag in flags):
            found.append(Argument(flags, metavar, meaning, is_required))
    return found


def describe(meaning: str, default: str) -> str:
    """Return the help text of an argument, without defaults that are Python expressions."""
    text = re.sub(r"%\(default\)\w", default.replace("\\", r"\\"), meaning).replace("%%", "%")
    text = re.sub(r" \(default:? [^()]*\(\)[^()]*\)", "", text)
    return text or (f"default: {default}" if default and "." not in default else "")


def read_docs(name: str) -> str:
    """Return the docstring of a program as Markdown; commands are indented as code."""
    if name == "launch/train.py":
        return str(read_constants(ast.parse((ROOT / "megatron_rl/cli/help.py").read_text()))["TRAIN_USAGE"])
    docs = textwrap.dedent(ast.get_docstring(ast.parse((ROOT / name).read_text())) or "")
    lines: list[str] = []
    for line in docs.splitlines():
        is_command = re.match(r" {2,3}\S| {6}\S", line)
        if is_command and lines and not lines[-1].startswith("    "):
            lines.append("")
        lines.append(f"  {line}" if is_command else line)
    return "\n".join(lines)


def render_program(name: str) -> str:
    """Return the section of one program."""
    lines = [f"### {NAMES.get(name, name)}", "", read_docs(name), ""]
    arguments = read_arguments(ROOT / PARSERS.get(name, name))
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
    for each in arguments:
        shown = ", ".join(each.flags) if each.flags[0].startswith("-") else each.metavar or each.flags[0].upper()
        value = f" {each.metavar}" if each.flags[0].startswith("-") and each.metavar else ""
        required = " (required)" if each.is_required else ""
        lines.append(f"| `{shown}{value}`{required} | {escape(each.meaning)} |")
    return "\n".join([*lines, ""])


def render_command_line() -> str:
    """Return the Markdown of the command-line reference."""
    parts = [HEADER]
    for section, names in COMMANDS.items():
        parts += [f"## {section}\n", *map(render_program, names)]
    return "\n".join(parts)
