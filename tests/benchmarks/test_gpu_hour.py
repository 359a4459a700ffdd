"""benchmarks/gpu on a CPU: every script at its smallest sizes, the parts that need CUDA with
made-up numbers, and errors that the scripts must detect.
"""

import re
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch._inductor
from torch._inductor import config, lowering
from torch.nn.attention import varlen as torchs

from megatron_rl.config import ModelSettings, ParallelSettings
from megatron_rl.distributed.world import World
from megatron_rl.errors import RunFailed
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy import attention
from megatron_rl.policy.vision import LinearPatchEmbed
from megatron_rl.rollout.renderer import Renderer
from megatron_rl_tools.data import make_shapes
from tests.benchmarks.test_benchmarks import benchmark, rows
from tests.conftest import ROOT
from tests.contracts.test_configs import settings_of
from tests.policy.test_attention import aligned, bottom_right, pairs
from tests.support import fork_server
from tests.support.packed_example import make_picture, user_message

FOLDER = ROOT / "benchmarks" / "gpu"


def script(name: str) -> ModuleType:
    """Import a script without running it."""
    sys.path.insert(0, str(FOLDER))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[list[str]]]:
    """Return said(script, *arguments), which runs the script and returns the rows of all its
    tables.
    """

    def run(name: str, *arguments: object) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        script(name).main()
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [\w-]", line)]

    return run


def test_none_is_left_out() -> None:
    """Every script in benchmarks/gpu that has a main function is named in this module."""
    tested = Path(__file__).read_text()
    scripts = [path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text()]
    assert scripts and not [name for name in scripts if not re.search(rf'"{name}(\.py)?"', tested)]


def test_swiglu(said: Callable[..., list[list[str]]]) -> None:
    """Both kernels have the error of bfloat16, below 1e-2; a copy has none."""
    (_, *kernels), copied = said("swiglu", "--tiny")[:3], said("swiglu", "--tiny")[3]
    assert [row[0] for row in kernels] == ["Megatron-Core", "this project"] and copied[::3] == ["copy", "-"]
    assert all(0 < float(row[3]) < 1e-2 for row in kernels)


def test_conv(said: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both patch embeddings give the same output, within 1e-2. If the project's implementation
    computes something else, the reported distance exceeds 0.5.
    """
    found = said("conv", "--tiny")[1:]
    assert [row[:2] for row in found] == [[num, how] for num in ("16", "32") for how in ("product", "conv3d")]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and row[4] == "-" for row in found)
    assert all(float(off) < 1e-2 for row in found for off in row[5:])
    monkeypatch.setattr(LinearPatchEmbed, "forward", lambda self, x: nn_linear(x.flatten(1).flip(1), self.weight)[..., None, None, None])
    assert all(float(row[5]) > 0.5 for row in said("conv", "--tiny")[1:] if row[1] == "conv3d")
    slow = said("conv", "--patches", 2, 3, "--patience", 0)[1:]
    assert [row[2] == "not measured" for row in slow] == [False, False, True, True]


def nn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.flatten(1))


def test_varlen(said: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script accepts the dense path, and a kernel that follows torch's contract. It detects a
    kernel whose causal mask is aligned to the first key instead of the last.
    """
    num_checks = 9
    dense = said("varlen", "--tiny")
    assert [row[-1] for row in dense[1 : 1 + num_checks]] == ["yes"] * num_checks
    assert all(float(rate) > 0 for row in dense[2 + num_checks :] for rate in row[1:])

    def is_bfloat16(_: torch.device, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def top_left(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: attention.VarlenInputs, causal: bool, scale: float
    ) -> torch.Tensor:
        parts = zip(pairs(cut.cu_query_S1), pairs(cut.cu_key_S1), strict=True)
        return torch.cat([aligned(q[a:b], k[c:d], v[c:d], causal, scale, to_first=True) for (a, b), (c, d) in parts])

    for where in (attention, script("varlen")):
        monkeypatch.setattr(where, "has_varlen_kernel", is_bfloat16)
        monkeypatch.setattr(where, "varlen_attention", bottom_right)
    assert [row[-1] for row in said("varlen", "--tiny")[1 : 1 + num_checks]] == ["yes"] * num_checks
    for where in (attention, script("varlen")):
        monkeypatch.setattr(where, "varlen_attention", top_left)
    with pytest.raises(RunFailed, match="is not bottom-right aligned"):
        said("varlen", "--tiny")
    monkeypatch.setattr(script("varlen"), "require_prefix_attention", lambda *_: None)
    checks = said("varlen", "--tiny")[-3 - num_checks - 1 : -4]
    assert [row[1:2] + row[-1:] for row in checks] == [["apart", "yes"], ["windows", "yes"], ["shared prompt", "NO"]] * 3


def test_what_varlen_counts() -> None:
    """The number of attended pairs equals a count by enumeration, and every timed case has 32768
    tokens.
    """
    varlen = script("varlen")
    offsets, prefix_S = [0, 3, 5, 6], [-1, 0, 1]
    listed = sum(1 for q in range(3) for k in range(q + 1)) + sum(3 + q + 1 for q in range(2)) + (2 + 1)
    assert varlen.pairs(offsets, prefix_S) == listed
    assert {offsets[-1] for offsets, _ in varlen.sizes(tiny=False).values()} == {32768}


def test_columns_of_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory columns of a device with 80 GB, 50 GB of which are in use. torch has reserved 40
    GB, and its peak since the start of the phase is 45 GB.
    """
    order = []
    for name, value in {
        "is_available": True, "mem_get_info": (30 * 10**9, 80 * 10**9), "memory_reserved": 40 * 10**9, "max_memory_allocated": 45 * 10**9,
        "synchronize": None, "reset_peak_memory_stats": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: order.append(name) or value)
    cycle = script("cycle")
    ledger = cycle.Ledger(SimpleNamespace(rollout_bytes=1, sync_bytes=50 * 10**9, update_bytes=1))
    assert ledger.phase(0, "sync", lambda: order.append("act") or 7) == 7
    ledger.phase(0, "engine wake-up", lambda: None)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[3:] for row in cells] == [["50.00", "40.00", "55.00", "50.00", "1.100"], ["50.00", "40.00", "55.00", "-", "-"]]
    first = order[: order.index("max_memory_allocated")]
    assert first.index("reset_peak_memory_stats") < first.index("act") < len(first) - 1 - first[::-1].index("synchronize")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    assert cycle.gpu_here() == "l40s", "which has an l4 in its name"


def test_cycle(random_model: Path) -> None:
    """Two cycles with a real engine and a real policy: after the second weight sync, logprobs of
    engine and trainer differ by less than 1e-4.
    """
    ended = fork_server.run_script(FOLDER / "cycle.py", "--model", random_model, "--tiny", "--eager", "--gpu", "h100", timeout_s=200)
    assert ended.returncode == 0, ended.stdout[-6000:]
    found = rows(ended.stdout)
    phases = ["sync", "policy offload", "engine wake-up", "rollout", "engine sleep", "policy reload", "update"]
    turns = [row for row in found if row[0] in "01"]
    assert [row[:2] for row in turns] == [[str(turn), phase] for turn in range(2) for phase in phases]
    assert all(row[3:6] == ["-"] * 3 and row[7] == "-" for row in turns), "no memory is measured on a CPU"
    assert {row[1] for row in turns if row[6] != "-"} == {"rollout", "sync", "update"}
    of_turn = {row[0]: row[1] for row in found if len(row) == 2}
    assert float(of_turn["rollout_mismatch/logprob_abs_diff_max, last turn"]) < 1e-4
    sent = sum(shape.numel() for shape in read_spec(random_model).shapes().values()) * 4 / 1e9
    assert of_turn["sync GB, GB/s"].startswith(f"{sent:.3f}, ") and float(of_turn["sampled tokens / s"]) > 0


@pytest.mark.parametrize("name", ["cycle", "mfu"])
def test_memory_is_that_of_a_run(name: str, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script makes the allocator settings of entrypoints/train.py before the processes connect.
    Otherwise, its memory peaks would be those of a different allocator than a run's.
    """
    module = script(name) if name == "cycle" else benchmark(name)
    monkeypatch.setattr(sys, "argv", [name, "--model", str(random_model)])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    for device, expected in (("cuda", ["trim_malloc", "expand_segments"]), ("cpu", ["trim_malloc"])):
        order: list[str] = []
        monkeypatch.setattr(module, "read_world", lambda device=device: World(0, 1, 0, torch.device(device)))
        for step in ("trim_malloc", "expand_segments"):
            monkeypatch.setattr(module, step, lambda step=step, order=order: order.append(step))
        monkeypatch.setattr(module, "connect", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module.main()
        assert order == expected


@pytest.mark.parametrize("name", ["cycle", "mfu"])
def test_every_way_to_compute_again_can_be_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """--recompute accepts the same four values as parallel.recompute."""
    with pytest.raises(ValueError, match="^parallel.recompute=x: ") as told:
        ParallelSettings(recompute="x")
    ways = set(re.findall(r"none|selective|vision|full|\bx\b", str(told.value))) - {"x"}
    monkeypatch.setattr(sys, "argv", [name, "--model", "there", "--recompute", "x"])
    with pytest.raises(SystemExit):
        (script(name) if name == "cycle" else benchmark(name)).main()
    said = capsys.readouterr().err.partition("choose from")[2]
    assert len(ways) == 4 and set(re.findall(r"\w+", said)) == ways


def make_container(*entries: tuple[int, int, bytes]) -> bytes:
    """Return a fat binary container with entries of (kind, architecture, payload), each after a
    64-byte header.
    """
    made = b""
    for kind, architecture, payload in entries:
        made += struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, architecture).ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(made)) + made


def test_code_for_other_architectures_is_zeroed() -> None:
    """Machine code for sm_90 is kept if it exists; otherwise, PTX of an older architecture is kept.
    All other code is zeroed, and no byte moves.
    """
    slices, ptx, code = script("slices"), 1, 2
    both = make_container((ptx, 80, b"p80"), (code, 80, b"c80"), (code, 90, b"c90"), (code, 90, b"c90a"), (code, 100, b"c100"))
    only_ptx = make_container((ptx, 80, b"P80"), (code, 75, b"C75"), (ptx, 100, b"P100"))
    pruned = slices.prune(b"ELF" + both + b"between" + only_ptx + b"end")
    expected = b"ELF" + both + b"between" + only_ptx + b"end"
    for gone in (b"p80", b"c80", b"c100", b"C75", b"P100"):
        expected = expected.replace(gone, bytes(len(gone)))
    assert pruned == expected and b"c90a" in pruned and b"P80" in pruned
    for size, wrong in ((4, 9), (4, 2)):
        damaged = both.replace(struct.pack("<IQ", 64, size), struct.pack("<IQ", 64, wrong))
        with pytest.raises(ValueError, match="the fat binary ending at byte .* has an invalid entry: "):
            slices.prune(damaged + bytes(200))


def test_slices(tmp_path: Path) -> None:
    """The script extracts the listed libraries and the Python files from a wheel, and names a
    library that the wheel lacks.
    """
    slices = script("slices")
    names = [*slices.LIBRARIES, "vllm/__init__.py", "vllm/_moe_C.abi3.so", "vllm/vllm-rs", "vllm/x/include/a.h"]
    wheel = tmp_path / "vllm.whl"
    for left_out in ("vllm/spinloop.abi3.so", ""):
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                if name != left_out:
                    file.writestr(name, name)
        if left_out:
            with pytest.raises(ValueError, match=left_out):
                slices.cut(wheel, tmp_path)
    slices.cut(wheel, tmp_path / "site")
    kept = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert kept == {name: name for name in {*slices.LIBRARIES, "vllm/__init__.py"}}


def test_older_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a torch version whose varlen_attn has no enable_gqa argument, scripts and modules run
    with a wrapper that drops the argument.
    """
    older = script("older_torch")
    assert older.understood(torchs.varlen_attn) is torchs.varlen_attn, "the pinned one knows the argument"

    def kernel(q: int, *, scale: float, window_size: tuple[int, int]) -> tuple:
        return q, scale, window_size

    assert older.understood(kernel)(1, scale=2.0, window_size=(-1, 0), enable_gqa=True) == (1, 2.0, (-1, 0))
    monkeypatch.setattr(torchs, "varlen_attn", kernel)
    monkeypatch.setattr(sys, "argv", ["older_torch.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    asks = "import sys\nfrom torch.nn.attention.varlen import varlen_attn\n"
    (tmp_path / "own.py").write_text(f"{asks}print(__name__, sys.argv[1:], varlen_attn(3, scale=1, window_size=0, enable_gqa=False))")
    older.main([str(tmp_path / "own.py"), "-x", "1"])
    older.main(["-m", "own", "-x", "2"])
    assert capsys.readouterr().out == "__main__ ['-x', '1'] (3, 1, 0)\n__main__ ['-x', '2'] (3, 1, 0)\n"


def test_older_torch_compiles_with_the_options_of_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option for concatenations is dropped if torch.compile lacks it; the limit of the lowering
    is then zero while max_pointwise_cat_inputs is 0."""
    older, limits = script("older_torch"), []

    def lower() -> None:
        limits.append(8)

    monkeypatch.setattr(torch, "compile", lambda function, options: options)
    for key in (torch.ops.aten.cat, torch.ops.aten.cat.default):
        monkeypatch.setitem(lowering.lowerings, key, lower)
    given = {"max_pointwise_cat_inputs": 0, "max_complex_pointwise_cat_inputs": 0}
    older.accept_cat_options()
    assert torch.compile(lower, options=given) == given and lowering.lowerings[torch.ops.aten.cat] is lower, "the pinned one has the option"
    monkeypatch.setattr(torch._inductor, "list_options", list)
    older.accept_cat_options()
    assert torch.compile(lower, options=given) == {"max_pointwise_cat_inputs": 0}
    with config.patch(max_pointwise_cat_inputs=0):
        lowering.lowerings[torch.ops.aten.cat]()
    lowering.lowerings[torch.ops.aten.cat.default]()
    assert limits == [0, 8]


def test_the_parts_of_the_hour(tmp_path: Path) -> None:
    """The steps of each part name existing scripts and options, and the settings of their runs
    compose.
    """
    first_hour = script("first_hour")
    for tiny in (False, True):
        folders = first_hour.Folders(tmp_path, tmp_path / "models", tmp_path / "out", tiny)
        for make in first_hour.PARTS.values():
            for step in [step for stage in make(folders) for step in (*stage.steps, *stage.background)]:
                words = [word for word in step.words if word != first_hour.RUN[0]]
                if words[0].endswith(".py") and words[0] != "launch/train.py":
                    source = (ROOT / words[0]).read_text()
                    options = [word for word in words[1:] if word.startswith("--") and "make_tiny" not in words[0]]
                    assert not [option for option in options if f'"{option}"' not in source], step.words
                if words[0] == "launch/train.py":
                    assert settings_of(*words[1:]).model.dtype == ("float32" if tiny else "bfloat16")
    pinned = re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements" / "gpu.txt").read_text(), re.MULTILINE)
    assert not set((FOLDER / "need.txt").read_text().splitlines()) - set(pinned)


def test_an_hour_with_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that fails or times out does not prevent the other steps and leaves no processes or
    partial results behind. A step is skipped if its result exists or its input is missing.
    """
    first_hour = script("first_hour")
    half, whole = tmp_path / "half", tmp_path / "whole"
    child = f"import os; os.mkdir({str(half)!r}); "
    child += "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    steps = [
        first_hour.Step("late", 2, ("-c", child), makes=half),
        first_hour.Step("fails", 20, ("-c", "print('| never | shown |'); raise SystemExit(3)")),
        first_hour.Step("made", 20, ("-c", "1 / 0"), makes=tmp_path),
        first_hour.Step("lacks", 20, ("-c", "1 / 0"), needs=tmp_path / "absent"),
        first_hour.Step("well", 20, ("-c", f"import os; os.mkdir({str(whole)!r}); print('words'); print('| a | 1 |')"), makes=whole),
    ]
    beside = first_hour.Step("beside", 20, ("-c", "print('| b | 2 |')"))
    assert not first_hour.hour(1, [first_hour.Stage(steps, [beside])], kit=tmp_path, out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert [(row[0], row[3]) for row in rows(printed[printed.index("| step") :])] == [
        ("late", "timed out after 2 s"), ("fails", "exit code 3"), ("well", "well"), ("beside", "well"),
    ]  # fmt: skip
    assert "words" not in printed and "\n| a | 1 |\n" in printed
    assert first_hour.tables(["x", "| a |", "|---|", "| 1 |", "y", "| b |", "|---|"]) == [
        "",
        "| a |",
        "|---|",
        "| 1 |",
        "",
        "| b |",
        "|---|",
    ]
    log = (tmp_path / "out" / "part1.txt").read_text()
    assert "words\n| a | 1 |" in log
    pid = int(re.search(r"^(\d+)$", log, re.MULTILINE)[1])
    time.sleep(0.2)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    assert whole.exists() and not half.exists(), "half of what a step makes is not taken for the whole"
    slow = first_hour.Step("slow", 1, ("-c", "import time; time.sleep(2)"))
    stage = first_hour.Stage([slow, first_hour.Step("other", 1, ("-c", "1 / 0"))]).only("sl")
    assert first_hour.hour(1, [stage], kit=tmp_path, out=tmp_path / "out", patience=20)


def test_a_released_size_that_speaks(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With make_shapes --words, the folder has the tokenizer and token ids of the given model, and
    its own shapes.
    """
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(make_shapes.RELEASED_SIZES["qwen2_5_vl"], "7B", small)
    config = make_shapes.make_released_config("7B")
    config["vision_config"] |= {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64, "fullatt_block_indexes": [0]}
    monkeypatch.setattr(make_shapes, "make_released_config", lambda _, family: config)
    monkeypatch.setattr(make_shapes, "BLOCK_SIZE", 1 << 16)
    assert make_shapes.main(["--size", "7B", "--words", str(random_model), "--out", str(tmp_path / "out")]) == 0
    spec, theirs = read_spec(tmp_path / "out"), read_spec(random_model)
    assert spec.vocab_size == 152064 and spec.image_token_id == theirs.image_token_id and spec.vision_start_id == theirs.vision_start_id
    prompts = [
        Renderer(ModelSettings(path=str(each))).prompt([user_message("?", make_picture(1, 56, 56))])
        for each in (tmp_path / "out", random_model)
    ]
    assert prompts[0].token_ids == prompts[1].token_ids and spec.image_token_id in prompts[0].token_ids
    assert make_shapes.main(["--size", "7B", "--words", str(tmp_path), "--out", str(tmp_path / "other")]) == 1


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", [1, 2])
def test_a_whole_part(part: int, tmp_path: Path) -> None:
    """The timeouts are 10 times as long, because the CPU may be busy."""
    given = ("--part", part, "--out", tmp_path / "out", "--kit", tmp_path / "kit", "--tiny", "--patience", 10)
    ended = fork_server.run_script(FOLDER / "first_hour.py", *given, timeout_s=3500)
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"part{part}.txt"} | ({"metrics.jsonl"} if part == 1 else set())
