"""Runs the external services of a run in a separate job (launch/serve.py), on any node."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.config import Settings, require
from megatron_rl.run.shutdown import StopSignal
from megatron_rl.services.service_launcher import POLL_S, LaunchedService, check_service, enabled_services


def serve_external_services(settings: Settings, *, is_run_finished: Callable[[], bool]) -> bool:
    """Run the services that are marked `external` until the run ends.

    Starts the services and publishes their addresses. Returns True if the run has ended, and False
    if this job received a stop signal. If the run had already ended before this job started, the
    job assumes that the run will be resumed, and waits for the resumed run.

    Raises:
        ValueError: A service has exited.
    """
    require(
        not settings.run.overwrite,
        "run.overwrite",
        True,
        "this job would rename the run directory that contains the service addresses; start both jobs with a new run.dir instead",
    )
    marked = {name: replace(service, external=False) for name, service in enabled_services(settings.services).items() if service.external}
    remedy = "no service is marked as external; mark it in the settings of the run and of this job: services.judge.external=true"
    require(bool(marked), "services", ", ".join(enabled_services(settings.services)), remedy)
    own: list[LaunchedService] = []
    with StopSignal(grace_s=0.0) as stop, ExitStack() as running:
        stop.mark_started()
        for name, service in marked.items():
            check_service(name, service, num_used_gpus=0, num_gpus=torch.cuda.device_count())
            own.append(LaunchedService(name, service, run=Path(settings.run.dir), host=socket.gethostname()))
            running.callback(own[-1].stop)
        has_begun = False
        while not stop.is_requested:
            for service in own:
                service.poll()
            is_at_work = not is_run_finished()
            if has_begun and not is_at_work:
                return True
            has_begun |= is_at_work
            time.sleep(POLL_S)
    return False
