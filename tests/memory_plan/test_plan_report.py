"""Lines of the plan report about engines."""

from types import SimpleNamespace

import pytest

from megatron_rl.config import EngineSettings
from megatron_rl.memory_plan.plan_report import _engine_line


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ({}, "engine: 40.0 GB = weights 10.0 GB, largest step 6.0 GB, cache 24.0 GB: 4,096 tokens, 2.0 full sequences"),
        (
            {"mode": "server", "num_local_servers": 3, "tp": 2},
            "engine: 3 servers on 6 additional GPUs of the first node, each 40.0 GB = weights 10.0 GB, ",
        ),
    ],
)
def test_where_engines_compute(engine: dict, line: str) -> None:
    """The engine line states the memory of colocated engines, and the number of GPUs of local
    servers."""
    planned = SimpleNamespace(
        engine=SimpleNamespace(budget_bytes=40e9, weight_bytes=10e9, step_bytes=6e9, cache_bytes=24e9, cache_tokens=4096)
    )
    assert _engine_line(planned, SimpleNamespace(engine=EngineSettings(max_model_len=2048, **engine))).startswith(line)
