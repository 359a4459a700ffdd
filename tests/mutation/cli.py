"""Mutants of megatron_rl/cli/."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        "a file of settings wins over the command line",
        "megatron_rl/cli/config_file.py",
        "return [override for file in files for override in read_config_file(Path(file))] + others",
        "return others + [override for file in files for override in read_config_file(Path(file))]",
        "tests/cli/test_config_file.py",
    ),
    Mutant(
        "a folder of the current directory replaces the built-in settings",
        "megatron_rl/cli/app.py",
        'search_path.append("current-directory"',
        'search_path.prepend("current-directory"',
        "tests/cli/test_config_file.py",
    ),
    Mutant(
        "the difference lists settings that are as they were",
        "megatron_rl/cli/help.py",
        "if value != defaults.get(key)]",
        "]",
        "tests/cli/test_config_file.py",
    ),
    Mutant(
        "a reader that ends is answered with a traceback",
        "megatron_rl/cli/app.py",
        "            with exit_with_reader():\n                print(render_help",
        "            with nullcontext():\n                print(render_help",
        "tests/cli/test_command.py -k no_error",
    ),
    Mutant(
        "garbage is never collected after the start",
        "megatron_rl/compat/startup.py",
        "        gc.enable()\n",
        "        gc.disable()\n",
        "tests/cli/test_startup.py",
    ),
    Mutant(
        "the last line of a program moves the terminal",
        "megatron_rl/cli/app.py",
        'print(f"error: {to_printable(line)}"',
        'print(f"error: {line}"',
        "tests/io/test_bounded_files.py -k terminal",
    ),
    Mutant(
        "what an evaluation states moves the terminal",
        "megatron_rl/cli/compare.py",
        "console.print(to_printable(line), ",
        "console.print(line, ",
        "tests/io/test_bounded_files.py -k terminal",
    ),
    Mutant(
        "any library may load a wandb that nobody asked for",
        "megatron_rl/cli/app.py",
        "    if is_disabled or loaded is not None:",
        "    if loaded is not None:",
        "tests/cli/test_mistakes.py -k wandb_is_not_loaded",
    ),
    Mutant(
        "help forgets what a key means",
        "megatron_rl/config/field_docs.py",
        "                docs[name] = str(text)",
        "                pass",
        "tests/contracts/test_field_docs.py",
    ),
    Mutant(
        "a remedy quotes the brackets of a list",
        "megatron_rl/cli/override_quoting.py",
        "if is_list or (value_type is None",
        "if (value_type is None",
        "tests/cli/test_override_quoting.py -k gives_the_list",
    ),
    Mutant(
        "a remedy is not quoted for the shell",
        "megatron_rl/cli/override_quoting.py",
        'return shlex.quote(f"{key}={quote_value(value, setting_type(key))}")',
        "return f\"'{key}={quote_value(value, setting_type(key))}'\"",
        "tests/cli/test_override_quoting.py -k gives_the_list",
    ),
    Mutant(
        "an error of all ranks is printed by each",
        "megatron_rl/cli/app.py",
        "on_all_ranks=is_dry or isinstance(error, SharedValueError | SharedOSError)",
        "on_all_ranks=False",
        "tests/distributed/test_world.py -k known_as_such",
    ),
    Mutant(
        "a full /dev/shm is not named",
        "megatron_rl/cli/app.py",
        "exit_with_line(add_disk_full_hint(str(error)), world",
        "exit_with_line(str(error), world",
        "tests/cli/test_told_once.py -k names_its_disk",
    ),
    Mutant(
        "another disk is said to be full",
        "megatron_rl/cli/app.py",
        ".free < MIN_FREE_BYTES]",
        ".free >= MIN_FREE_BYTES]",
        "tests/cli/test_told_once.py -k no_name",
    ),
)
