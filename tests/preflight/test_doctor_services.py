"""The doctor's report on inference servers that a run starts itself."""

import os

import pytest

from megatron_rl.config import EngineSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.preflight import doctor_services
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.doctor_services import check_engine_servers
from megatron_rl.services import engine_servers as room


def told(**engine: object) -> CheckReport:
    report, settings = CheckReport(), EngineSettings(**engine)
    check_engine_servers(
        Settings(model=ModelSettings(path="m"), run=RunSettings(dir="d"), task=TaskSettings(name="vqa"), engine=settings), report
    )
    return report


def test_who_starts_none_hears_nothing() -> None:
    """Without servers that the run starts itself, the report has no row for them."""
    assert told().findings == told(mode="server", urls=["http://a:1"]).findings == []


def test_what_is_started_where_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server is listed with its core. A warning is given if there are fewer cores than ranks
    and servers together.
    """
    monkeypatch.setattr(room, "is_on_gpu", lambda settings: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    report = told(mode="server", num_local_servers=3)
    assert dict(report.findings) == {"engines": "3 servers: core 1, core 2, core 3"} and report.warnings == report.errors == []
    report = told(mode="server", num_local_servers=4)
    assert report.warnings == ["engine.num_local_servers=4: there are fewer cores than the 1 ranks and the servers need; they share cores"]


def test_what_is_started_where_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "is_on_gpu", lambda settings: True)
    monkeypatch.setattr(doctor_services.torch.cuda, "device_count", lambda: 5)
    assert dict(told(mode="server", num_local_servers=2, tp=2).findings) == {"engines": "2 servers: GPU 1-2, GPU 3-4"}
    (error,) = told(mode="server", num_local_servers=3, tp=2).errors
    assert error.startswith("engine.num_local_servers=3: 6 GPUs are needed in addition to 1 for the ranks, but ") and error.endswith(
        "5 in total; start 2"
    )
