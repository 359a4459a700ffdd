"""Services as a job of their own (launch/serve.py): what the run waits for, on whatever node this is."""

import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.config import Settings, require
from megatron_rl.services.serving import LOOK_S, Service, check_service, chosen
from megatron_rl.stop import Stop


def serve(settings: Settings) -> None:
    """Start the services that are marked `elsewhere`, publish their addresses, end them when asked to stop. ValueError: one has ended."""
    marked = {name: replace(service, elsewhere=False) for name, service in chosen(settings.services).items() if service.elsewhere}
    remedy = "nothing is to be started by another job; mark it in the run's settings and here: services.judge.elsewhere=true"
    require(bool(marked), "services", ", ".join(chosen(settings.services)), remedy)
    own: list[Service] = []
    with Stop(grace_s=0.0) as stop, ExitStack() as running:
        for name, service in marked.items():
            check_service(name, service, num_ranks=0, num_gpus=torch.cuda.device_count())
            own.append(Service(name, service, run=Path(settings.run.dir), host=socket.gethostname()))
            running.callback(own[-1].end)
        while not stop.is_asked:
            for service in own:
                service.look()
            time.sleep(LOOK_S)
