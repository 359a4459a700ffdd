"""What a server of vLLM imports to be an engine of a run: its sampling is the policy's, its weights are the trainer's.

    --logits-processors megatron_rl.rollout.vllm.worker_extension:BanAndSeed
    --worker-extension-cls megatron_rl.rollout.vllm.worker_extension.Served
    --weight-transfer-config '{"backend": "megatron_rl"}'
The whole command is server_command.py's. Weights come by vLLM's own four calls; they are proven as a local engine's are
(weight_receiver.py), and against the digest of what the trainer sent, before the update can be finished and has a version.

Read against vLLM 0.32.0: v1/worker/{worker_base,gpu_worker}.py, distributed/weight_transfer/base.py.
"""

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

from megatron_rl.rollout.vllm.sampler import BANNED, ban_and_seed, use_own_noise
from megatron_rl.rollout.vllm.server_command import BACKEND, nature
from megatron_rl.rollout.vllm.weight_receiver import Arrival, Weights, keep_weights_plain
from megatron_rl.rollout.vllm.weight_transport import WIRES, Bucket, Digest, Meeting, Wire, store_of, unpacked

BanAndSeed = ban_and_seed()


@dataclass
class Claim(WeightTransferInitInfo):
    """Who the server's weights come from from now on."""

    owner: str
    """Example: `runs/mine of 4711@node1`."""
    address: str
    port: int
    size: int
    kind: str
    timeout_s: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """transfer.Bucket as it comes by HTTP."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int
    digest: str = ""


class Receiver(WeightTransferEngine[Claim, Update]):
    init_info_cls, update_info_cls = Claim, Update

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self._wire: Wire | None = None
        self._owner = ""
        self._weights: Weights | None = None
        self._arrival: Arrival | None = None
        self._digest = Digest()
        self._is_proven = False

    def init_transfer_engine(self, claim: Claim) -> None:
        """RuntimeError: another run has this engine, and lives."""
        if self._wire is not None and self._owner != claim.owner and _is_there(self._wire):
            raise RuntimeError(f"this engine is that of {self._owner}")
        self._wire, self._owner = None, claim.owner
        meeting = Meeting(address=claim.address, port=claim.port, size=claim.size, kind=claim.kind, timeout_s=claim.timeout_s)
        rank = 1 + self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self._wire = WIRES[claim.kind](meeting, store_of(meeting, rank=rank), rank=rank)
        self._weights = self._weights or Weights(self.model, bucket_bytes=0)

    def start_weight_update(self) -> None:
        if self._wire is None:
            raise RuntimeError("no run has this engine")
        self._arrival, self._digest, self._is_proven = Arrival(self._weights), Digest(), False

    def receive_weights(self, update: Update) -> None:
        """RuntimeError: this is no update's, or what was sent is not what the engine holds. vLLM then regards the update as over."""
        if self._arrival is None:
            raise RuntimeError("weight sync: no update was begun")
        bucket = Bucket(names=update.names, dtypes=update.dtypes, shapes=update.shapes, num_bytes=update.num_bytes, digest=update.digest)
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        self._wire.broadcast(flat)
        tensors = unpacked(bucket, flat)
        self._digest.add(tensors)
        self._arrival.take(tensors)
        if bucket.digest:
            if self._digest.text() != bucket.digest:
                raise RuntimeError("weight sync: what came is not what was sent")
            self._arrival.end()
            self._arrival, self._is_proven = None, True

    def finish_weight_update(self) -> None:
        if not self._is_proven:
            raise RuntimeError("weight sync: not all was sent")

    def shutdown(self) -> None:
        self._wire, self._owner, self._arrival = None, "", None


def _is_there(wire: Wire) -> bool:
    """Whether the trainer's end of it lives."""
    try:
        wire.store.check(["alive"])
    except RuntimeError:  # torch.distributed.DistError is one
        return False
    return True


class Served:
    """Joins vLLM's worker class."""

    def rl_nature(self) -> dict[str, str]:
        """What must be as the run has it (command.nature). Whoever asks has come to use the engine: from now on noise is the run's."""
        config = self.vllm_config
        if current_platform.is_cpu():
            use_own_noise(self.model_runner)
        transfer, limits = config.weight_transfer_config, config.model_config.multimodal_config.limit_per_prompt
        return nature(
            config.model_config.model,
            dtype=str(config.model_config.dtype).removeprefix("torch."), max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs, max_images=limits["image"].count,
            banned_ids=config.additional_config.get(BANNED, []), logprobs_mode=config.model_config.logprobs_mode,
            backend=transfer.backend if transfer else "", pixels=config.model_config.multimodal_config.mm_processor_kwargs,
        )  # fmt: skip


if current_platform.is_cpu():
    keep_weights_plain()
WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
