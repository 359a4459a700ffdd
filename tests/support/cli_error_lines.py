"""Runs command lines in this single process. Each must end before it starts anything persistent.

    cli_error_lines.py LINES.json

LINES.json contains a list of argument lists. For each of them, the script prints a line of JSON:
[exit code, standard error].
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path

from megatron.core import parallel_state

from megatron_rl.cli import cli


def run_command_line(words: list[str]) -> tuple[object, str]:
    """Run launch/train.py with these arguments. Return its exit code and its standard error."""
    sys.argv[1:] = words
    said, environment = io.StringIO(), dict(os.environ)
    try:
        with redirect_stderr(said):
            cli()
    except SystemExit as end:
        return end.code, said.getvalue()
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        os.environ.clear()
        os.environ.update(environment)
    return 0, said.getvalue()


if __name__ == "__main__":
    for line in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run_command_line(line)), flush=True)
