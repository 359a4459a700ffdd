"""Time from an address of the viewer to the drawn page, in Chromium, for 100,000 rollouts.

    .venv/bin/python benchmarks/viewer_page.py
    .venv/bin/python benchmarks/viewer_page.py --tiny      # smoke test

The first row is the first view after the start of the viewer, when it still reads the tables. The
run directory is that of viewer_folder.py.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import viewer_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.services.supervised_process import find_free_port
from tests.support.browser import open_browser

NUM_BYTES = 4.25e9
"""Size of a run with 100,608 short rollouts (viewer_folder.py)."""
VIEWS = ("", "", "&sort=reward&descending=true", "&text=heat", "&is_mixed=true", "&offset=90000")


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="smoke test with a small run")
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("error: no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        size = viewer_folder.Size("short", 20, 1) if given.tiny else viewer_folder.SIZES[0]
        viewer_folder.make(run, size, num_bytes=2e6 if given.tiny else NUM_BYTES)
        command = [sys.executable, "-m", "megatron_rl.observe.viewer", str(run), "--port", str(find_free_port("127.0.0.1"))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
            try:
                assert served.stdout is not None, "it is a pipe"
                url = served.stdout.readline().strip()
                print("| view | seconds |\n|---|---|")
                with open_browser(chromium, Path(folder) / "browser") as page:
                    for view in VIEWS:
                        begin = time.perf_counter()
                        page.navigate(f"{url}#/rollouts?run=run{view}")
                        print(f"| rollouts{view} | {time.perf_counter() - begin:.2f} |", flush=True)
            finally:
                served.terminate()


if __name__ == "__main__":
    main()
