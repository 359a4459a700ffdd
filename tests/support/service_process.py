"""A process that starts a service and is killed by test_services.py.

    service_process.py RUN COMMAND ...

RUN/up appears when the service is up.
"""

import sys
import time
from pathlib import Path

from megatron_rl.config import ServiceSettings
from megatron_rl.services.service_launcher import LaunchedService

if __name__ == "__main__":
    run = Path(sys.argv[1])
    service = LaunchedService("judge", ServiceSettings(kind="vllm", model="m", command=sys.argv[2:]), run=run, host="127.0.0.1")
    while not service.url:
        service.poll()
        time.sleep(0.05)
    (run / "up").touch()
    time.sleep(600)
