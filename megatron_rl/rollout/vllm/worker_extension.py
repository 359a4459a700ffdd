"""vLLM plugin that lets a server work as a rollout engine of a run.

    --logits-processors megatron_rl.rollout.vllm.worker_extension:BanAndSeed
    --worker-extension-cls megatron_rl.rollout.vllm.worker_extension.RlWorkerExtension
    --weight-transfer-config '{"backend": "megatron_rl"}'

With the plugin, the server samples like a colocated engine and receives its weights from the
trainer. server_command.py builds the complete command. A weight update uses the four calls of
vLLM's own weight-transfer interface. An update can be finished only if the digest of the received
weights equals the trainer's digest, and if the engine's weights pass the same checks as in a
colocated engine (weight_receiver.py).

Written against vLLM 0.32.0: v1/worker/{worker_base,gpu_worker}.py,
distributed/weight_transfer/base.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.platforms import current_platform

from megatron_rl.rollout.vllm.engine_core import RECORDING_SCHEDULER
from megatron_rl.rollout.vllm.routed_experts import install_recorder
from megatron_rl.rollout.vllm.sampler import BANNED_IDS_KEY, make_logits_processor, use_seeded_noise
from megatron_rl.rollout.vllm.server_command import TRANSFER_BACKEND, engine_fingerprint, routed_experts_property
from megatron_rl.rollout.vllm.weight_receiver import EngineWeights, WeightReceiver, disable_weight_packing
from megatron_rl.rollout.vllm.weight_transport import TRANSPORTS, Bucket, Rendezvous, Transport, UpdateDigest, open_store, unpack_bucket

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

BanAndSeed = make_logits_processor()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Describes the trainer that will send weights to the server."""

    owner: str
    """Name of the trainer's process. Example: `runs/mine of 4711@node1`."""
    address: str
    port: int
    size: int
    kind: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Layout of a bucket (weight_transport.Bucket), as received over HTTP."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int
    digest: str = ""


class VllmWeightEndpoint(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM weight-transfer backend that receives updates from the trainer and verifies them."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._transport: Transport | None = None
        self._owner = ""
        self._weights: EngineWeights | None = None
        self._receiver: WeightReceiver | None = None
        self._digest = UpdateDigest()
        self._is_proven = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the process group of a trainer.

        Raises:
            RuntimeError: The engine belongs to another run that is still alive.
        """
        if self._transport is not None and self._owner != init_info.owner and _is_trainer_alive(self._transport):
            raise RuntimeError(f"this engine is in use by {self._owner}")
        self._transport, self._owner = None, init_info.owner
        meeting = Rendezvous(
            address=init_info.address, port=init_info.port, size=init_info.size, kind=init_info.kind, timeout_s=init_info.timeout_s
        )
        rank = 1 + self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self._transport = TRANSPORTS[init_info.kind](meeting, open_store(meeting, rank=rank), rank=rank, device=self.device)
        self._weights = self._weights or EngineWeights(self.model, bucket_bytes=0)

    def start_weight_update(self) -> None:
        """Start an update.

        Raises:
            RuntimeError: The engine does not belong to any run.
        """
        if self._transport is None:
            raise RuntimeError("this engine is not connected to a run")
        assert self._weights is not None, "set with the transport"
        self._receiver, self._digest, self._is_proven = WeightReceiver(self._weights), UpdateDigest(), False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive a bucket; after the last bucket, verify the update.

        Raises:
            RuntimeError: No update was started, or the engine's weights differ from the sent
                weights. vLLM then treats the update as ended.
        """
        if self._receiver is None:
            raise RuntimeError("weight sync: no update was started")
        bucket = Bucket(
            names=update_info.names,
            dtypes=update_info.dtypes,
            shapes=update_info.shapes,
            num_bytes=update_info.num_bytes,
            digest=update_info.digest,
        )
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        assert self._transport is not None, "an update needs a transport"
        self._transport.broadcast(flat)
        tensors = unpack_bucket(bucket, flat)
        self._digest.add(tensors)
        self._receiver.receive_bucket(tensors)
        if bucket.digest:
            if self._digest.hexdigest() != bucket.digest:
                raise RuntimeError("weight sync: the received weights differ from the sent weights")
            self._receiver.finish()
            self._receiver, self._is_proven = None, True

    def finish_weight_update(self) -> None:
        """Raise RuntimeError unless the whole update was received and verified."""
        if not self._is_proven:
            raise RuntimeError("weight sync: the update is incomplete")

    def shutdown(self) -> None:
        """Leave the trainer's process group."""
        self._transport, self._owner, self._receiver = None, "", None


def _is_trainer_alive(transport: Transport) -> bool:
    try:
        transport.store.check(["alive"])
    except RuntimeError:  # torch.distributed.DistError is a RuntimeError
        return False
    return True


class RlWorkerExtension:
    """Methods that are added to vLLM's worker class."""

    vllm_config: "VllmConfig"
    model_runner: "GPUModelRunner"

    def rl_fingerprint(self) -> dict[str, str]:
        """Return the properties that must match the run (server_command.engine_fingerprint).

        A run calls this method before it uses the engine. On a CPU, the call switches the engine to
        seeded noise (sampler.use_seeded_noise).
        """
        config = self.vllm_config
        if current_platform.is_cpu():
            use_seeded_noise(self.model_runner)
        transfer, multimodal = config.weight_transfer_config, config.model_config.multimodal_config
        assert multimodal is not None, "the model reads images"
        limits, additional = multimodal.limit_per_prompt, cast("dict[str, Any]", config.additional_config)
        return engine_fingerprint(
            config.model_config.model,
            dtype=str(config.model_config.dtype).removeprefix("torch."), max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs, max_images=limits["image"].count,
            banned_ids=additional.get(BANNED_IDS_KEY, []), logprobs_mode=config.model_config.logprobs_mode,
            backend=transfer.backend if transfer else "", pixels=multimodal.mm_processor_kwargs,
        ) | routed_experts_property(config.scheduler_config.scheduler_cls == RECORDING_SCHEDULER)  # fmt: skip


if current_platform.is_cpu():
    disable_weight_packing()
install_recorder()
WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, VllmWeightEndpoint)
