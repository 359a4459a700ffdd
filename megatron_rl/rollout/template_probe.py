"""Standalone program that renders a chat template under kernel resource limits.

A chat template may contain endless loops. processor.require_bounded_template therefore runs this
program, which imports only Jinja, in a separate process. The program reads a JSON object with the
keys template, seconds, num_bytes and conversations from standard input. The exit code is 0 unless a
limit was exceeded; processor.check_template reports all other errors of the template.
"""

import json
import resource
import sys

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def main() -> None:
    """Set the limits and render the conversations."""
    given = json.load(sys.stdin)
    for kind, most in ((resource.RLIMIT_CPU, given["seconds"]), (resource.RLIMIT_AS, given["num_bytes"]), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        template = environment.from_string(given["template"])
        for messages in given["conversations"]:
            template.render(messages=messages, add_generation_prompt=True)
    except (TemplateError, TypeError, KeyError, AttributeError, ValueError, IndexError, RecursionError, ArithmeticError):
        return


if __name__ == "__main__":
    main()
