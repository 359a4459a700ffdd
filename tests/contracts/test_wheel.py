"""The wheel in a separate environment, next to a user's package with the name of one of this
project's folders."""

import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.wheels import build_wheel

TOP_LEVEL = {"megatron_rl", "megatron_rl_sandbox", "megatron_rl_tools"}


def run(*command: object, cwd: Path) -> str:
    """Run a command without this process's search path and return its output."""
    result = subprocess.run([*map(str, command)], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_three_packages_and_their_data(wheel: Path) -> None:
    """No package has a name as general as tools or sandbox, and no test is installed."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == TOP_LEVEL
    data = (
        "megatron_rl/py.typed",
        "megatron_rl/configs/train.yaml",
        "megatron_rl_tools/data/qwen2_5_vl.jinja",
        "megatron_rl_sandbox/pool.py",
    )
    assert set(data) <= {*names}


def test_the_wheel_works_next_to_a_package_called_tools(wheel: Path, tmp_path: Path) -> None:
    """Imports, subprocesses of the sandbox and commands work in an environment that has only the
    wheel, its dependencies and another package called tools."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    # The development environment's .pth files, which point to the source tree, are not read from here.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--ignore-installed", wheel, cwd=tmp_path)
    (site / "tools").mkdir()
    (site / "tools" / "__init__.py").write_text("OWNER = 'someone else'\n")
    code = "import tools, megatron_rl_sandbox as s, megatron_rl_tools.convert.merger as m; print(tools.OWNER, s.__file__, m.__file__)"
    owner, *files = run(python, "-c", code, cwd=tmp_path).rsplit(maxsplit=2)
    assert owner == "someone else" and all(Path(file).is_relative_to(site) for file in files)
    assert run(python.with_name("merger"), "--help", cwd=tmp_path).startswith("usage: ")
    assert "experiment=" in run(python.with_name("megatron-rl"), "train", "--help", cwd=tmp_path)
    (tmp_path / "code.py").write_text("print(6 * 7)\n")
    assert "42" in run(python, "-m", "megatron_rl_sandbox", "run", "code.py", "--isolation", "none", cwd=tmp_path)
