"""Makes a vLLM engine return the experts of every token that it computes.

vLLM 0.32.0 has an option for this (enable_return_routed_experts), which needs its second model
runner; this project uses the first. `RecordingScheduler` and `RoutedExpertsRecorder` take the place
of vLLM's scheduler and worker parts (distributed/aux_output_connector/). Capturing in the layers,
selecting the accepted rows and passing them to the client are vLLM's own code.

The worker keeps a table with the experts of every slot of the KV cache. A token of a cached prefix
has its experts in the table, just as it has its keys and values in the cache. If a request is
preempted, its tokens are computed again; experts that were already returned are not returned again.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from megatron_rl.rollout.vllm.engine_core import RECORDING_SCHEDULER

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class _RequestedRows(AuxOutputSchedulerConnector):
    """vLLM's selection of accepted rows; the worker needs no data from the scheduler."""

    def build_connector_meta(self, *_: object) -> None:
        """Return None: the worker's own state contains all that it needs."""


class RecordingScheduler(Scheduler):
    """vLLM's scheduler, which returns the experts of each token with the sampled tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = _RequestedRows()


class RoutedExpertsRecorder:
    """Records the experts of all tokens that a model runner computes."""

    def __init__(self, runner: GPUModelRunner, kv_cache_config: KVCacheConfig) -> None:
        """Bind the recorder to the runner's layers.

        Call before CUDA graphs are captured, because the graphs must contain the capture.
        """
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        model = runner.get_model()
        bind_routed_experts_capturer(model, self._capturer)
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        """Numbers of the sparse layers."""
        # A model with gated delta nets has further groups; their blocks have no slots of tokens.
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        number, spec = next(each for each in enumerate(groups) if isinstance(each[1], AttentionSpec))
        self._table = runner.input_batch.block_table[number]
        shape = (kv_cache_config.num_blocks * spec.block_size, len(self._layers), self._capturer.shape_per_token[1])
        self._experts_by_slot = np.zeros(shape, self._capturer.output_dtype_name)
        self._num_returned: dict[str, int] = {}
        """Number of leading tokens of each request with experts that need not be returned again."""
        self._sample_tokens = runner.sample_tokens
        cast("Any", runner).sample_tokens = self.sample_tokens

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as the runner does, and add the experts of the requests that sampled a token."""
        state = self._runner.execute_model_state
        if state is None:
            return self._sample_tokens(grammar_output)
        spans = self._record(state.scheduler_output.num_scheduled_tokens)
        output = self._sample_tokens(grammar_output)
        sampled = zip(output.req_ids, output.sampled_token_ids, strict=True)
        output.aux_output_connector_output = {name: self._rows(name, spans[name]) for name, tokens in sampled if tokens}
        return output

    def _record(self, num_scheduled: dict[str, int]) -> dict[str, int]:
        """Store the step's experts by slot; return the number of computed tokens by request."""
        batch = self._runner.input_batch
        rows = self._capturer.snapshot_routing_data(sum(num_scheduled.values())).cpu().numpy()[:, self._layers]
        first, stops = 0, {}
        for index, name in enumerate(batch.req_ids):
            start, num = int(batch.num_computed_tokens_cpu[index]), num_scheduled[name]
            self._experts_by_slot[self._slots(index, start, start + num)] = rows[first : first + num]
            first, stops[name] = first + num, start + num
        self._num_returned = {name: number for name, number in self._num_returned.items() if name in self._runner.requests}
        return stops

    def _rows(self, name: str, stop: int) -> AuxRequestOutput:
        """Return the experts of a request up to token `stop` that were not returned before."""
        sampling = self._runner.requests[name].sampling_params
        assert sampling is not None, "the request generates tokens"
        start = self._num_returned.get(name, sampling.routed_experts_prompt_start)
        self._num_returned[name] = max(start, stop)
        return AuxRequestOutput(start, self._experts_by_slot[self._slots(self._runner.input_batch.req_id_to_index[name], start, stop)])

    def _slots(self, index: int, start: int, stop: int) -> np.ndarray:
        position_N = np.arange(start, stop)
        size = self._table.block_size
        return self._table.block_table.np[index, position_N // size] * size + position_N % size


def install_recorder() -> None:
    """Make model runners with RecordingScheduler record experts. Call before engines are built."""
    original = GPUModelRunner.initialize_kv_cache
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def initialize_kv_cache(runner: GPUModelRunner, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **options: Any) -> None:
        original(runner, kv_cache_config, is_profiling, **options)
        if runner.vllm_config.scheduler_config.scheduler_cls == RECORDING_SCHEDULER and not is_profiling:
            RoutedExpertsRecorder(runner, kv_cache_config)

    cast("Any", GPUModelRunner).initialize_kv_cache = initialize_kv_cache
