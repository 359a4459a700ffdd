"""Mutants that only a GPU would show, planted in several packages. Tests notice them on the emulated
device: an operation raises, or the number of waits changes.
"""

from tests.mutation.mutant import Mutant

ON_DEVICE = "-p tests.support.cuda.session tests/cuda/emulated/"
MUTANTS = (
    Mutant(
        "the offsets of attention stay on the host",
        "megatron_rl/policy/attention.py",
        "cu_query_S1=to_device(torch.tensor(self.offset_S1, dtype=torch.int32), self.device)",
        "cu_query_S1=torch.tensor(self.offset_S1, dtype=torch.int32)",
        ON_DEVICE + "test_device.py",
    ),
    Mutant(
        "the offsets of attention have 64 bits",
        "megatron_rl/policy/attention.py",
        "torch.tensor(list(accumulate(lengths)), dtype=torch.int32)",
        "torch.tensor(list(accumulate(lengths)))",
        ON_DEVICE + "test_device.py",
    ),
    Mutant(
        "queries are float32 in the attention kernel",
        "megatron_rl/policy/attention.py",
        "return run_varlen_kernel(varlen_attention, q_TND, k_TKD",
        "return run_varlen_kernel(varlen_attention, q_TND.float(), k_TKD",
        ON_DEVICE + "test_device.py",
    ),
    Mutant(
        "the longest segment is measured without its prefix",
        "megatron_rl/policy/attention.py",
        "max_key_length=max(lengths)",
        "max_key_length=self.max_length",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "indices are sent from memory that is not page-locked",
        "megatron_rl/policy/attention.py",
        '(tensor.pin_memory() if device.type == "cuda" else tensor).to(device',
        "tensor.to(device",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "image patches are joined in memory that is not page-locked",
        "megatron_rl/policy/patches.py",
        "dtype=like.dtype, pinned=True)",
        "dtype=like.dtype, pinned=False)",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "every norm reads its input on the host",
        "megatron_rl/policy/transformer.py",
        "        return fused_rms_norm(x, self.weight, self.eps)",
        "        assert x.isfinite().all()\n        return fused_rms_norm(x, self.weight, self.eps)",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "the positions of sampled tokens are searched on the device",
        "megatron_rl/policy/network.py",
        "return model(batch, batch.row_R), partial",
        "return model(batch, batch.mask_T.nonzero()[:, 0]), partial",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "Megatron reads the norm of every gradient",
        "megatron_rl/policy/optimizer.py",
        "with _norm_on_device(), _using_own_cores()",
        "with _using_own_cores()",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "the mask of banned ids stays on the host",
        "megatron_rl/policy/logprobs.py",
        "    return mask_V.to(device)",
        "    return mask_V",
        ON_DEVICE + "test_waits.py",
    ),
    Mutant(
        "offloaded parameters are allocated again without their values",
        "megatron_rl/policy/offload.py",
        "            _as_bytes(storage).copy_(host)\n",
        "",
        ON_DEVICE + "test_resume.py",
    ),
    Mutant(
        "micro-batches of every rank are on the first GPU",
        "megatron_rl/policy/policy.py",
        "multiple_of=multiple, device=self.network.device)",
        'multiple_of=multiple, device=torch.device("cuda", 0))',
        "tests/cuda/test_emulated_ranks.py",
    ),
    Mutant(
        "a rank leaves out the sum over the vocabulary",
        "megatron_rl/policy/logprobs.py",
        "        if group.size() > 1:\n            dist.all_reduce(sums_3R, group=group)",
        "        if group.size() > 1 and group.rank() == 0:\n            dist.all_reduce(sums_3R, group=group)",
        "tests/cuda/test_emulated_ranks.py",
    ),
    Mutant(
        "parameters are sent as every second number of a tensor",
        "megatron_rl/weights/stream.py",
        "dist.all_gather(list(flat.unbind(0)), local, group",
        "dist.all_gather(list(flat.unbind(0)), local.repeat_interleave(2)[::2], group",
        "tests/cuda/test_emulated_ranks.py",
    ),
)
