"""Teacher of on-policy distillation: a model in the policy's parallel layout.

A forward pass before the first update computes the teacher's final hidden states of the sampled
tokens. The update multiplies them with the teacher's output layer, one block of rows at a time, so
that the teacher's distribution over the whole vocabulary is never stored. Per sampled token, the
hidden states take 2 * hidden_size bytes of host memory (bfloat16).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from megatron_rl.config import LoraSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.divergence import TeacherTerm, VocabDivergence
from megatron_rl.policy.load_model import load_model
from megatron_rl.policy.logprobs import TeacherComparison, TokenDistribution
from megatron_rl.policy.offload import HostCopy
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import ImagePatchFn, patch_bytes
from megatron_rl.policy.pipeline import Pipeline
from megatron_rl.policy.server_teacher import ServerTeacher
from megatron_rl.policy.transformer import HeadConfig, ModelChunks
from megatron_rl.types import MicroBatch


@dataclass(slots=True, frozen=True, kw_only=True)
class TeacherModel:
    """Model of a teacher on this rank."""

    chunks: ModelChunks
    pipeline: Pipeline
    """Pipeline that runs the chunks."""
    vocab_size: int
    loaded: Callable[[], AbstractContextManager[None]]
    """Returns a context manager; inside its block, the chunks contain the teacher's weights."""


def load_teacher_model(
    path: str, layout: Layout, *, dtype: str, patches: ImagePatchFn = patch_bytes, key: str = "distill.teacher"
) -> TeacherModel:
    """Load a teacher in the policy's parallel layout.

    On a GPU, the weights stay in host memory except while they are in use.

    Args:
        path: Hugging Face folder of the teacher.
        layout: Parallel layout of the policy.
        dtype: Data type of the weights (model.dtype).
        patches: Function that returns the patches of an image.
        key: Setting that names the folder, for error messages.
    """
    spec = read_spec(path, key=key)
    built = load_model(
        spec, layout, path, dtype=dtype, lora=LoraSettings(), heads=HeadConfig(), seed=0, key=key
    )  # fmt: skip
    chunks = built.chunks
    chunks.requires_grad_(False)
    pipeline = Pipeline(chunks, list(chunks), layout, patches)
    if pipeline.device.type != "cuda":
        return TeacherModel(chunks=chunks, pipeline=pipeline, vocab_size=spec.vocab_size, loaded=nullcontext)
    host = HostCopy(chunks.parameters())
    host.copy_to_host()
    host.free_device_memory()

    @contextmanager
    def restored() -> Iterator[None]:
        host.restore()
        try:
            yield
        finally:
            host.free_device_memory()

    return TeacherModel(chunks=chunks, pipeline=pipeline, vocab_size=spec.vocab_size, loaded=restored)


class Teacher:
    """Frozen model that provides target distributions for the policy."""

    def __init__(self, model: TeacherModel, layout: Layout, *, policy: TokenDistribution, term: TeacherTerm | None) -> None:
        """Copy the output layer of the model, which stays on the device.

        Args:
            model: Model of the teacher.
            layout: Parallel layout of the policy.
            policy: Token distribution of the policy. The teacher's distribution has the same
                temperature and vocabulary parallelism. Ids that the policy never samples, and ids
                that only one of the models has, have probability 0 in both.
            term: Divergence of the update; None if the update needs only the teacher's logprobs.
        """
        self._model = model
        num = policy.banned_V.numel()
        ids = torch.arange(policy.first_id, policy.first_id + num, device=policy.banned_V.device)
        self._output_VH = None
        if layout.is_last_stage:
            with model.loaded():
                self._output_VH = self._gather_output_layer(layout, first_id=policy.first_id, num=num)
        banned_V = policy.banned_V | (ids >= model.vocab_size)
        self._distribution = TokenDistribution(banned_V, policy.temperature, policy.first_id, policy.group, policy.rows_per_block)
        self._divergence = None
        if term is not None:
            self._divergence = VocabDivergence(
                terms=term.divergence, banned_V=banned_V, temperature=policy.temperature, group=policy.group, top_k=term.top_k
            )  # fmt: skip

    def logprobs(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Return the teacher's logprobs [T] of each micro-batch; 0 where mask_T is False.

        The teacher reads `teacher_batch` of a micro-batch that has one, which has the same sampled
        tokens in the same order. If the update has a divergence term, teacher_hidden_RH of the
        micro-batches is set on the last pipeline stage. All ranks must call this method together.
        """
        hidden: list[torch.Tensor] = []

        def logprob_R(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
            if self._divergence is not None and len(rows_R):
                hidden.append(_copy_to_host(hidden_RH))
            return self._distribution(self.logits, hidden_RH, batch.target_T[rows_R])[0]

        read = [batch.teacher_batch or batch for batch in batches]
        with self._model.loaded():
            results = self._model.pipeline.forward_only(read, logprob_R)
        # Only the last stage has hidden states, and micro-batches that a pipeline adds have none.
        for batch, hidden_RH in zip((batch for batch in batches if len(batch.row_R)), hidden, strict=False):
            batch.teacher_hidden_RH = hidden_RH
        return [
            torch.zeros_like(batch.weight_T).index_copy(0, batch.row_R, logprob_1T[0][other.row_R])
            for batch, other, logprob_1T in zip(batches, read, results, strict=True)
        ]

    @property
    def has_divergence(self) -> bool:
        """True if the update has a divergence term."""
        return self._divergence is not None

    def compare(self, batch: MicroBatch) -> TeacherComparison | None:
        """Return the comparison of the policy with the teacher in a micro-batch.

        Returns None if the update has no divergence term.
        """
        if self._divergence is None:
            return None
        assert self._output_VH is not None
        hidden_RH = batch.teacher_hidden_RH
        if hidden_RH is None:  # the micro-batch has no sampled tokens
            hidden_RH = self._output_VH.new_zeros(0, self._output_VH.shape[1])
        hidden_RH = hidden_RH.to(self._output_VH.device, non_blocking=True)
        return TeacherComparison(columns=(hidden_RH,), divergence=self._diverge)

    def _diverge(self, logits_RV: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self._divergence is not None
        return self._divergence(logits_RV, self.logits(hidden_RH))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute the teacher's logits for this rank's part of the policy's vocabulary.

        `hidden_RH` are final hidden states of the teacher. Last pipeline stage only.
        """
        assert self._output_VH is not None
        return hidden_RH @ self._output_VH.T

    def _gather_output_layer(self, layout: Layout, *, first_id: int, num: int) -> torch.Tensor:
        """Return rows first_id .. first_id + num - 1 of the teacher's output layer, zero-padded.

        The vocabulary of a teacher can have more padding than the policy's, so that the shards of
        tensor-parallel ranks begin at different ids.
        """
        last = self._model.chunks[-1]
        is_tied = last.share_embeddings_and_output_weights
        weight = last.shared_embedding_or_output_weight() if is_tied else cast("torch.Tensor", last.language.output_layer.weight)
        parts = [torch.empty_like(weight) for _ in range(layout.tp)]
        dist.all_gather(parts, weight.detach().contiguous(), group=layout.tp_group)
        rows_VH = torch.cat(parts)[first_id : first_id + num]
        return torch.nn.functional.pad(rows_VH, (0, 0, 0, num - rows_VH.shape[0])).clone()


def teacher_logprobs(teachers: Sequence[Teacher | ServerTeacher], batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Return the logprobs [T] of each micro-batch under its own teacher; see Teacher.logprobs.

    The result is 0 for a micro-batch without a teacher. The teachers run one after the other, so
    that the device holds the weights of one teacher at a time.
    """
    assert teachers, "the policy has no teacher"
    found = [torch.zeros_like(batch.weight_T) for batch in batches]
    for index, teacher in enumerate(teachers):
        places = [place for place, batch in enumerate(batches) if batch.teacher == index]
        if places:  # the ranks of a model replica have the same micro-batches
            assert isinstance(teacher, Teacher), "a teacher on servers has scored the tokens after each episode"
            own = teacher.logprobs([batches[place] for place in places])
            for place, logprob_T in zip(places, own, strict=True):
                found[place] = logprob_T
    return found


def compare_with_teacher(teachers: Sequence[Teacher | ServerTeacher], batch: MicroBatch) -> TeacherComparison | None:
    """Return the comparison of the policy with the teacher of a micro-batch.

    Returns None if the micro-batch has no teacher, or if the update has no divergence term.
    """
    return teachers[batch.teacher].compare(batch) if teachers and batch.teacher >= 0 else None


def _copy_to_host(hidden_RH: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, made without blocking the host.

    The copy back to the device is queued on the same stream, and so waits for this one.
    """
    if not hidden_RH.is_cuda:
        return hidden_RH
    host_RH = torch.empty_like(hidden_RH, device="cpu", pin_memory=True)
    return host_RH.copy_(hidden_RH, non_blocking=True)
