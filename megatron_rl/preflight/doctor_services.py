"""What the doctor says of the servers that a run starts for itself."""

import torch

from megatron_rl.config import Settings
from megatron_rl.distributed.world import read_world
from megatron_rl.preflight.check_report import Report
from megatron_rl.services.engine_servers import SHARED, check_engines, num_taken, placed
from megatron_rl.services.service_launcher import check_service, chosen


def look_at_services(settings: Settings, report: Report) -> None:
    """What the run starts for itself can be started here."""
    taken = num_taken(settings.engine, num_ranks=read_world().local_size)
    for name, service in chosen(settings.services).items():
        try:
            check_service(name, service, num_taken=taken, num_gpus=torch.cuda.device_count())
        except ValueError as error:
            report.fail(f"service {name}", str(error))
        else:
            report.say(f"service {name}", f"{service.kind} {service.model}, {'elsewhere' if service.external else 'can be started'}")


def look_at_engines(settings: Settings, report: Report) -> None:
    """What engines the run starts for itself, and where."""
    engine, num_ranks = settings.engine, read_world().local_size
    if not engine.num_local_servers:
        return
    try:
        check_engines(engine, num_ranks=num_ranks, num_gpus=torch.cuda.device_count())
    except ValueError as error:
        report.fail("engines", str(error))
        return
    where = placed(engine, num_ranks=num_ranks)
    report.say("engines", f"{engine.num_local_servers} servers: {where}")
    if where == SHARED:
        told = f"there are fewer cores than the {num_ranks} ranks and the servers; they take turns"
        report.warnings.append(f"engine.num_local_servers={engine.num_local_servers}: {told}")
