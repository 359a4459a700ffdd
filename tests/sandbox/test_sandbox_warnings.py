"""Tests the warnings that code in a box sees: the message and the code's own line, without a path
of the machine."""

import subprocess
import sys
import warnings
from pathlib import Path

from megatron_rl_sandbox.image_capture import format_warning
from tests.conftest import ROOT

CODE = """
import sys
from megatron_rl_sandbox.image_capture import ImageCapture
from megatron_rl_sandbox.records import BoxLimits
import matplotlib.pyplot as plt
gallery = ImageCapture(BoxLimits(), work_dir=sys.argv[1])
plt.title("\u4f60\u597d")
gallery.finish_call("")
plt.title("\u597d")
exec(compile("import warnings\\nwarnings.warn('mine')\\nplt.show()", "call_1", "exec"))
print(len(gallery.captured), file=sys.stderr)
"""


def test_a_figure_whose_font_has_no_such_letters(tmp_path: Path) -> None:
    """Warnings about missing glyphs have no path, and a warning of the code has its own line."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        env={"MPLBACKEND": "agg", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    *lines, taken = [line for line in done.stderr.splitlines() if "atplotlib" not in line]
    assert taken == "2" and sum("Glyph" in line and line.startswith("UserWarning: ") for line in lines) >= 2, done.stderr
    assert "call_1:2: UserWarning: mine" in lines
    assert not [line for line in lines if "/" in line.replace("\\N", "")], "no path"


def test_the_line_is_told_of_the_codes_own_warnings_alone() -> None:
    """Only warnings raised by the code of a call have a line. Outside of boxes, the format of
    warnings does not change."""
    assert format_warning("old", DeprecationWarning, "call_3", 7) == "call_3:7: DeprecationWarning: old\n"
    assert format_warning("old", DeprecationWarning, "/usr/lib/python3/x.py", 7) == "DeprecationWarning: old\n"
    assert warnings.formatwarning is not format_warning, "outside of boxes nothing changes"
