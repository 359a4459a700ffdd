r"""Serves the model of a run as an endpoint of OpenAI's chat completions, as in task=agent.

    python launch/serve.py runs/agent
    python launch/serve.py runs/agent --checkpoint best --host 0.0.0.0 --token-file key

The first argument is the run directory, its folder final/ or one of its checkpoints. The last line
of the start is the address for OPENAI_BASE_URL. Ctrl-C stops the server; exit code 1 means an error
of one line.

With the arguments of launch/train.py in place of a run, starts the external services of a run in a
separate job:

    python launch/serve.py experiment=vqa_3b_1gpu model.path=3b \
        'services.judge={kind: vllm, model: 7b, external: true}'

The addresses of the services are written to run.dir, where a run with the same arguments waits for
them. Exit code 0: the run is finished; 75: a signal (SIGTERM, SIGUSR1, Ctrl-C) stopped the
services. The job script launch/slurm/judge.sbatch does the same as a Slurm job.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
