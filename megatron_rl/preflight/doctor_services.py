"""The doctor's checks of the servers that a run starts itself."""

import torch

from megatron_rl.config import Settings
from megatron_rl.distributed.world import read_world
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.services.engine_servers import SHARED_CORES_TEXT, check_engines, describe_placement, num_used_gpus
from megatron_rl.services.service_launcher import check_service, enabled_services


def check_services(settings: Settings, report: CheckReport) -> None:
    """Check that the run's services can be started on this machine."""
    taken = num_used_gpus(settings.engine, num_ranks=read_world().local_size)
    for name, service in enabled_services(settings.services).items():
        try:
            check_service(name, service, num_used_gpus=taken, num_gpus=torch.cuda.device_count())
        except ValueError as error:
            report.add_failure(f"service {name}", str(error))
        else:
            report.add_finding(
                f"service {name}", f"{service.kind} {service.model}, {'elsewhere' if service.external else 'can be started'}"
            )


def check_engine_servers(settings: Settings, report: CheckReport) -> None:
    """Check that the run's inference servers can be started, and report their devices."""
    engine, num_ranks = settings.engine, read_world().local_size
    if not engine.num_local_servers:
        return
    try:
        check_engines(engine, num_ranks=num_ranks, num_gpus=torch.cuda.device_count())
    except ValueError as error:
        report.add_failure("engines", str(error))
        return
    where = describe_placement(engine, num_ranks=num_ranks)
    report.add_finding("engines", f"{engine.num_local_servers} servers: {where}")
    if where == SHARED_CORES_TEXT:
        told = f"there are fewer cores than the {num_ranks} ranks and the servers need; they share cores"
        report.warnings.append(f"engine.num_local_servers={engine.num_local_servers}: {told}")
