"""Replays recorded sequences and compares the results with Hugging Face's model.

The logprobs of tokens are compared first. If an implementation differs, its layers and tensors are
compared too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron_rl.distributed.world import World, run_on_rank_zero
from megatron_rl.explain.findings import TOLERANCES, CheckResult, LogprobComparison, LogprobTolerance
from megatron_rl.explain.hf_reference import HfReferenceModel
from megatron_rl.explain.hypotheses import HypothesisInputs, MismatchCase, find_changed_tensors, find_explanation
from megatron_rl.explain.layer_outputs import LayerDeviation, LayerOutputs, find_first_deviation, is_vision_output, layer_names
from megatron_rl.explain.live_engine import LiveEngine
from megatron_rl.explain.recorded_step import RecordedSequence, ReplaySettings
from megatron_rl.explain.sequence_checks import ImageToPatches, make_patch_fn
from megatron_rl.explain.trainer_forward import TrainerForward
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import Layout
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource

MAX_EXPLAINED = 3
"""Maximum number of sequences per implementation for which hypotheses are tested.

The first sequences that differ are used.
"""
RECORDED_ENGINE = "engine, recorded"
SampledLogprobs = Sequence[torch.Tensor | None]
"""For each sequence, the logprobs [R] of the sampled tokens, or None if they are unknown."""


@dataclass(slots=True)
class ReplayResult:
    """Replay results that ranks exchange with each other."""

    reference_logprobs: Sequence[torch.Tensor]
    """Logprobs [R] from Hugging Face's model for each sequence."""
    checks: list[CheckResult] = field(default_factory=list)
    comparisons: list[LogprobComparison] = field(default_factory=list)
    layer_differences: list[str] = field(default_factory=list)
    explanations: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ForwardReplay:
    """Replay of a step's sequences, with the reference model on the first rank."""

    spec: ModelSpec
    renderer: Renderer
    source: TensorSource
    older_source: TensorSource | None
    version: int
    step: int
    settings: ReplaySettings
    device: torch.device
    patches: ImageToPatches
    """Function that computes patches in the same way as the trainer."""
    images: Mapping[str, Image]
    max_model_bytes: int
    """Maximum size in bytes of one model's float32 weights in one process.

    The limit applies to Hugging Face's model and to the trainer's model separately.
    """
    reference: HfReferenceModel | None = None
    engine: LiveEngine | None = None

    @property
    def fits_one_process(self) -> bool:
        """True if the trainer's whole network fits into one process."""
        return sum(spec.shape.numel() for spec in self.source.specs.values()) * torch.float32.itemsize <= self.max_model_bytes

    @property
    def _built_reference(self) -> HfReferenceModel:
        assert self.reference is not None, "compare_recorded builds the reference"
        return self.reference

    def compare_recorded(self, sequences: Sequence[RecordedSequence]) -> ReplayResult:
        """Run Hugging Face's model in this process and compare the recorded logprobs with it."""
        reference = self.reference = HfReferenceModel(
            self.spec, self.source, banned_ids=self.renderer.banned_ids, patches=make_patch_fn(self.renderer), device=self.device,
            cache_bytes=self.max_model_bytes,
        )  # fmt: skip
        temperature = self.settings.temperature
        played = ReplayResult(
            [reference.compute_logprobs(each, reference.compute_logits(each), temperature=temperature) for each in sequences]
        )
        played.checks.append(self._check_positions(sequences))
        engine = [torch.tensor(each.recorded_logprobs, dtype=torch.float64) for each in sequences]
        self._compare_logprobs(played, sequences, RECORDED_ENGINE, engine, tolerance=TOLERANCES[self.settings.dtype])
        if self.version == self.step and any(each.tokens.old_logprobs for each in sequences):
            self._compare_logprobs(
                played,
                sequences,
                "trainer, recorded",
                list(map(_recorded_trainer_logprobs, sequences)),
                tolerance=TOLERANCES[self.settings.dtype],
            )
        played.checks += self._check_unchanged_tensors()
        return played

    def compare_one_process(self, result: ReplayResult, sequences: Sequence[RecordedSequence], layout: Layout) -> ReplayResult:
        """Run the trainer's network in this process alone and compare it with the reference."""
        trainer = self._build_trainer(layout)
        result.checks.append(self._check_tensors(trainer, "weights in the trainer"))
        one, packed = (trainer.compute_logprobs(sequences, packed=together) for together in (False, True))
        number = self._compare_logprobs(result, sequences, "trainer, one process", one, tolerance=TOLERANCES["float32"])
        self._compare_logprobs(result, sequences, "trainer, packed as an update", packed, tolerance=TOLERANCES["float32"])
        if number is not None:
            result.layer_differences += self._compare_layers(
                "trainer, one process", sequences[number], trainer.record_layer_outputs(sequences[number])
            )
        return result

    def compare_live_engine(
        self, result: ReplayResult, sequences: Sequence[RecordedSequence], *, world: World, group: dist.ProcessGroup | None
    ) -> ReplayResult:
        """Start an engine and compare its logprobs with the reference.

        All ranks call this method together.
        """
        given = self.settings
        self.engine = LiveEngine(given.model.path, given.engine, self.renderer, self.source, patches=self.patches, world=world)
        said = self.engine.compute_logprobs(sequences, temperature=given.temperature)

        def compare() -> ReplayResult:
            self._compare_logprobs(result, sequences, "engine, live", said, tolerance=TOLERANCES[given.engine.dtype])
            return result

        return run_on_rank_zero(compare, group=group)

    def close(self) -> None:
        """Shut down the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()

    def compare_at_layout(
        self, result: ReplayResult, sequences: Sequence[RecordedSequence], layout: Layout, *, group: dist.ProcessGroup | None
    ) -> ReplayResult:
        """Compare the trainer's network, sharded over all ranks, with the reference.

        All ranks call this method together.
        """
        name = f"trainer, tp {layout.tp} x pp {layout.pp}" + (f" x vpp {layout.vpp}" if layout.vpp > 1 else "")
        trainer = self._build_trainer(layout)
        tensors, said = (
            self._check_tensors(trainer, f"weights at tp {layout.tp} x pp {layout.pp}"),
            trainer.compute_logprobs(sequences, packed=True),
        )

        def compare() -> tuple[ReplayResult, int | None]:
            result.checks.append(tensors)
            return result, self._compare_logprobs(result, sequences, name, said, tolerance=TOLERANCES["float32"])

        result, number = run_on_rank_zero(compare, group=group)
        if number is not None:
            passed = trainer.record_layer_outputs(sequences[number])
            lines = run_on_rank_zero(lambda: self._compare_layers(name, sequences[number], passed), group=group)
            result.layer_differences += lines
        return result

    def _build_trainer(self, layout: Layout) -> TrainerForward:
        return TrainerForward(
            self.spec, layout, self.source, banned_ids=self.renderer.banned_ids, temperature=self.settings.temperature,
            patches=self.patches, device=self.device,
        )  # fmt: skip

    def _compare_logprobs(
        self,
        result: ReplayResult,
        sequences: Sequence[RecordedSequence],
        name: str,
        observed: SampledLogprobs,
        *,
        tolerance: LogprobTolerance,
    ) -> int | None:
        """Compare logprobs with the reference and search for an explanation of differences.

        Return the index of the first sequence that differs, or None if all sequences agree.
        """
        said = {number: said_R for number, said_R in enumerate(observed) if said_R is not None}
        known = list(said)
        cases = list(self._build_cases([sequences[number] for number in known], list(said.values()), tolerance, name == RECORDED_ENGINE))
        pairs = [(case, result.reference_logprobs[number]) for case, number in zip(cases, known, strict=True)]
        gaps = [case.abs_diffs(expected) for case, expected in pairs]
        compared = LogprobComparison(name=name, abs_diffs=[gap for each in gaps for gap in each], tolerance=tolerance)
        if compared.is_within_tolerance:
            result.comparisons.append(compared)
            return None
        wrong = [number for number, each in enumerate(gaps) if not tolerance.is_within(each)]
        # Each sequence may be within the tolerance while all of them together are not.
        wrong = wrong or [max(range(len(gaps)), key=lambda number: max(gaps[number], default=0.0))]
        told = self._describe_first_difference(*pairs[wrong[0]])
        result.comparisons.append(replace(compared, first_difference=told))
        suspicion = HypothesisInputs(
            reference=self._built_reference, renderer=self.renderer, images=self.images, older_source=self.older_source
        )
        for number in wrong[:MAX_EXPLAINED]:
            found = find_explanation(cases[number], suspicion)
            result.explanations.append(f"{name}, {cases[number].sequence}: {found or 'no hypothesis reproduces these logprobs'}")
        return known[wrong[0]]

    def _build_cases(
        self, sequences: Sequence[RecordedSequence], observed: Sequence[torch.Tensor], tolerance: LogprobTolerance, is_engine: bool
    ) -> Iterator[MismatchCase]:
        for each, said_R in zip(sequences, observed, strict=True):
            versions = [each.tokens.weight_versions[row + 1] == self.version or not is_engine for row in each.sampled_rows]
            compared_R = torch.tensor(versions, dtype=torch.bool)
            yield MismatchCase(
                sequence=each, observed_R=said_R.double(), mask_R=compared_R, temperature=self.settings.temperature, tolerance=tolerance
            )

    def _describe_first_difference(self, case: MismatchCase, expected_R: torch.Tensor) -> str:
        gap_R = (expected_R - case.observed_R).abs() * case.mask_R
        wrong = (~(gap_R <= case.tolerance.per_token)).nonzero()
        row = int(wrong[0]) if len(wrong) else int(gap_R.argmax())
        place = case.sequence.sampled_rows[row] + 1
        return (
            f"{case.sequence} {self._describe_token(case.sequence, place)}: {case.observed_R[row]:.6f}, Hugging Face {expected_R[row]:.6f}"
        )

    def _describe_token(self, sequence: RecordedSequence, place: int) -> str:
        """Describe a token; for an image placeholder, the description includes the image."""
        ids, shown = sequence.tokens.token_ids, ""
        if ids[place] == self.spec.image_token_id:
            before = sum(token == self.spec.image_token_id for token in ids[:place])
            counts = list(accumulate(image.num_tokens for image in sequence.tokens.images))
            shown = f" (of image {next(number for number, count in enumerate(counts) if before < count)})"
        return f"token {place} {self.renderer.tokenizer.decode([ids[place]])!r}{shown}"

    def _compare_layers(self, name: str, sequence: RecordedSequence, outputs: LayerOutputs) -> list[str]:
        """Describe the first layer that differs from Hugging Face's model for a sequence."""
        spec, right = self.spec, self._built_reference.record_layer_outputs(sequence)
        names = layer_names(spec.vision.num_blocks, spec.num_layers)
        are_distinct = len({image.key for image in sequence.tokens.images}) == len(sequence.tokens.images)
        names = names if are_distinct else [each for each in names if not is_vision_output(each)]  # the trainer encodes equal images once
        found = find_first_deviation(outputs, right, names)
        if found is None:
            return [f"{name}: all layers agree on {sequence}; the head, the temperature, the ids or the packing differs"]
        where = self._describe_row(sequence, found, num_rows=len(right[found.name]))
        first = f"first difference in {found.name}, {where}, {found.relative_diff:.2g} of the row norm"
        return [f"{name}: {first}; all earlier outputs agree ({found.max_diff_before:.1g})"]

    def _describe_row(self, sequence: RecordedSequence, found: LayerDeviation, *, num_rows: int) -> str:
        if found.row < 0:
            return f"{sequence}: different number of rows"
        if not is_vision_output(found.name):
            return f"{sequence} {self._describe_token(sequence, found.row)}"
        counts = list(accumulate(image.num_patches for image in sequence.tokens.images))
        place = found.row * counts[-1] // num_rows
        number = next(number for number, count in enumerate(counts) if place < count)
        return f"{sequence} image {number} ({sequence.tokens.images[number].key[:8]})"

    def _check_positions(self, sequences: Sequence[RecordedSequence]) -> CheckResult:
        result, reference = CheckResult("rotary positions", num_checked=len(sequences)), self._built_reference
        for each in sequences:
            ours, theirs = self.spec.rope_positions(each.tokens.token_ids, each.tokens.images), reference.compute_positions(each)
            wrong = (ours != theirs.cpu()).any(0).nonzero()
            if len(wrong):
                place = int(wrong[0])
                said = f"{ours[:, place].tolist()}, Hugging Face computes {theirs[:, place].tolist()}"
                result.problems.append(f"{each} {self._describe_token(each, place)}: {said}")
        return result

    def _check_tensors(self, trainer: TrainerForward, name: str) -> CheckResult:
        """Check that the weights exported by the trainer equal the source's weights."""
        result = CheckResult(name, unit="tensors")
        for tensor_name, tensor in trainer.hf_weights():
            result.num_checked += 1
            stored = self.source.read(tensor_name).float()
            gap = (tensor.detach().float().cpu() - stored).abs().max().item() if tensor.shape == stored.shape else float("inf")
            if gap != 0.0:
                result.problems.append(
                    f"{tensor_name}: differs from the weights by up to {gap:.3g}{self._describe_stale(tensor_name, tensor)}"
                )
        return result

    def _describe_stale(self, name: str, tensor: torch.Tensor) -> str:
        if self.older_source is None or not torch.equal(self.older_source.read(name).float(), tensor.detach().float().cpu()):
            return ""
        return "; it is stale: it equals the older weights"

    def _check_unchanged_tensors(self) -> list[CheckResult]:
        """Report tensors that equal the older weights if nearly all other tensors have changed."""
        if self.older_source is None or self.settings.trains_subset:
            return []
        weights = self._built_reference.weights
        moved = set(find_changed_tensors(weights, self.older_source))
        still = sorted(set(weights.names) - moved)
        result = CheckResult("changed weights", num_checked=len(moved), unit="tensors")
        if len(still) * 10 <= len(moved):
            result.problems += [f"{name}: equals the older weights, but {len(moved)} others have changed" for name in still]
        return [result]


def _recorded_trainer_logprobs(sequence: RecordedSequence) -> torch.Tensor | None:
    """Return the trainer's recorded logprobs, or None if the sequence has none."""
    old = sequence.tokens.old_logprobs
    return torch.tensor([old[row + 1] for row in sequence.sampled_rows], dtype=torch.float64) if old else None
