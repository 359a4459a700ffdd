"""Recorded contexts played back, and held against Hugging Face's model: tokens first, then layers and tensors of whoever differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron_rl.distributed.world import World, run_on_rank_zero
from megatron_rl.explain.findings import BOUNDS, Bound, Checked, Compared
from megatron_rl.explain.hf_reference import Reference
from megatron_rl.explain.hypotheses import Case, Suspicion, explanation, moved_tensors
from megatron_rl.explain.layer_outputs import Deviation, Passed, first_deviation, is_of_tower, order
from megatron_rl.explain.live_engine import LiveEngine
from megatron_rl.explain.recorded_step import Conditions, Looked
from megatron_rl.explain.sequence_checks import Patches, of_pixels
from megatron_rl.explain.trainer_forward import Trainer
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import Layout
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource

EXPLAINED = 3
"""Contexts of one party, the first that differ, for which suspects are looked for."""
RECORDED = "engine, recorded"
Said = Sequence[torch.Tensor | None]
"""Logprobs [R] of the sampled tokens of each context; None where they are not known."""


@dataclass(slots=True)
class Played:
    """What came of it; it travels from rank to rank."""

    expected: Sequence[torch.Tensor]
    """By Hugging Face's model."""
    checks: list[Checked] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Playback:
    """A step's contexts with what plays them. The reference is the first rank's."""

    spec: ModelSpec
    renderer: Renderer
    source: TensorSource
    older: TensorSource | None
    version: int
    step: int
    settings: Conditions
    device: torch.device
    patches: Patches
    """As the trainer makes them."""
    gallery: Mapping[str, Image]
    whole_bytes: int
    """Of weights in float32 that one process may hold of Hugging Face's model, and of the trainer's."""
    reference: Reference | None = None
    engine: LiveEngine | None = None

    @property
    def is_whole(self) -> bool:
        """Whether one process has the trainer's network whole."""
        return sum(spec.shape.numel() for spec in self.source.specs.values()) * torch.float32.itemsize <= self.whole_bytes

    def recorded(self, looked: Sequence[Looked]) -> Played:
        """What was said then, against Hugging Face's model in this process."""
        reference = self.reference = Reference(
            self.spec, self.source, banned_ids=self.renderer.banned_ids, patches=of_pixels(self.renderer), device=self.device,
            held_bytes=self.whole_bytes,
        )  # fmt: skip
        temperature = self.settings.temperature
        played = Played([reference.logprobs(each, reference.logits(each), temperature=temperature) for each in looked])
        played.checks.append(self._positions(looked))
        engine = [torch.tensor(each.recorded, dtype=torch.float64) for each in looked]
        self._compare(played, looked, RECORDED, engine, bound=BOUNDS[self.settings.dtype])
        if self.version == self.step and any(each.context.old_logprobs for each in looked):
            self._compare(played, looked, "trainer, recorded", list(map(_then, looked)), bound=BOUNDS[self.settings.dtype])
        played.checks += self._moved()
        return played

    def alone(self, played: Played, looked: Sequence[Looked], layout: Layout) -> Played:
        """Through the trainer's network in this process."""
        trainer = self._trainer(layout)
        played.checks.append(self._tensors(trainer, "weights in the trainer"))
        one, packed = (trainer.logprobs(looked, together=together) for together in (False, True))
        number = self._compare(played, looked, "trainer, one process", one, bound=BOUNDS["float32"])
        self._compare(played, looked, "trainer, packed as an update", packed, bound=BOUNDS["float32"])
        if number is not None:
            played.layers += self._layers("trainer, one process", looked[number], trainer.passed(looked[number]))
        return played

    def asked(self, played: Played, looked: Sequence[Looked], *, world: World, waiting: dist.ProcessGroup | None) -> Played:
        """By an engine that is started now; all ranks together."""
        given = self.settings
        self.engine = LiveEngine(given.model.path, given.engine, self.renderer, self.source, patches=self.patches, world=world)
        said = self.engine.logprobs(looked, temperature=given.temperature)

        def compare() -> Played:
            self._compare(played, looked, "engine, asked now", said, bound=BOUNDS[given.engine.dtype])
            return played

        return run_on_rank_zero(compare, group=waiting)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def at_layout(
        self, played: Played, looked: Sequence[Looked], layout: Layout, *, is_main: bool, waiting: dist.ProcessGroup | None
    ) -> Played:
        """The same with the trainer cut over all ranks, each of which calls this."""
        name = f"trainer, tp {layout.tp} x pp {layout.pp}" + (f" x vpp {layout.vpp}" if layout.vpp > 1 else "")
        trainer = self._trainer(layout)
        tensors, said = self._tensors(trainer, f"weights at tp {layout.tp} x pp {layout.pp}"), trainer.logprobs(looked, together=True)

        def compare() -> tuple[Played, int | None]:
            played.checks.append(tensors)
            return played, self._compare(played, looked, name, said, bound=BOUNDS["float32"])

        played, number = run_on_rank_zero(compare, group=waiting)
        if number is not None:
            passed = trainer.passed(looked[number])
            lines = run_on_rank_zero(lambda: self._layers(name, looked[number], passed), group=waiting)
            played.layers += lines
        return played

    def _trainer(self, layout: Layout) -> Trainer:
        return Trainer(
            self.spec, layout, self.source, banned_ids=self.renderer.banned_ids, temperature=self.settings.temperature,
            patches=self.patches, device=self.device,
        )  # fmt: skip

    def _compare(self, played: Played, looked: Sequence[Looked], name: str, said: Said, *, bound: Bound) -> int | None:
        """Hold what one says against the reference, and look for what explains it; the first context that differs, if any does."""
        known = [number for number, said_R in enumerate(said) if said_R is not None]
        cases = list(self._cases([looked[number] for number in known], [said[number] for number in known], bound, name == RECORDED))
        pairs = [(case, played.expected[number]) for case, number in zip(cases, known, strict=True)]
        gaps = [case.gaps(expected) for case, expected in pairs]
        compared = Compared(name=name, gaps=[gap for each in gaps for gap in each], bound=bound)
        if compared.is_normal:
            played.compared.append(compared)
            return None
        wrong = [number for number, each in enumerate(gaps) if not bound.holds(each)]
        wrong = wrong or [max(range(len(gaps)), key=lambda number: max(gaps[number], default=0.0))]  # each holds, all together do not
        told = self._told(*pairs[wrong[0]])
        played.compared.append(replace(compared, first=told))
        suspicion = Suspicion(reference=self.reference, renderer=self.renderer, gallery=self.gallery, older=self.older)
        for number in wrong[:EXPLAINED]:
            found = explanation(cases[number], suspicion)
            played.explained.append(f"{name}, {cases[number].looked}: {found or 'no suspect gives these numbers'}")
        return known[wrong[0]]

    def _cases(self, looked: Sequence[Looked], said: Said, bound: Bound, is_engine: bool) -> Iterator[Case]:
        for each, said_R in zip(looked, said, strict=True):
            versions = [each.context.weight_versions[row + 1] == self.version or not is_engine for row in each.rows]
            compared_R = torch.tensor(versions, dtype=torch.bool)
            yield Case(looked=each, said_R=said_R.double(), compared_R=compared_R, temperature=self.settings.temperature, bound=bound)

    def _told(self, case: Case, expected_R: torch.Tensor) -> str:
        gap_R = (expected_R - case.said_R).abs() * case.compared_R
        wrong = (~(gap_R <= case.bound.token)).nonzero()
        row = int(wrong[0]) if len(wrong) else int(gap_R.argmax())
        place = case.looked.rows[row] + 1
        return f"{case.looked} {self._token(case.looked, place)}: {case.said_R[row]:.6f}, Hugging Face {expected_R[row]:.6f}"

    def _token(self, looked: Looked, place: int) -> str:
        """A token with what it is; of a placeholder, whose."""
        ids, shown = looked.context.token_ids, ""
        if ids[place] == self.spec.image_token_id:
            before = sum(token == self.spec.image_token_id for token in ids[:place])
            counts = list(accumulate(image.num_tokens for image in looked.context.images))
            shown = f" (of picture {next(number for number, count in enumerate(counts) if before < count)})"
        return f"token {place} {self.renderer.tokenizer.decode([ids[place]])!r}{shown}"

    def _layers(self, name: str, looked: Looked, passed: Passed) -> list[str]:
        """Where a network first differs from Hugging Face's on a context."""
        spec, right = self.spec, self.reference.passed(looked)
        names = order(spec.vision.num_blocks, spec.num_layers)
        are_distinct = len({image.key for image in looked.context.images}) == len(looked.context.images)
        names = names if are_distinct else [each for each in names if not is_of_tower(each)]  # the trainer encodes each once
        found = first_deviation(passed, right, names)
        if found is None:
            return [f"{name}: every layer agrees on {looked}; the head, the temperature, the ids or what stands around it differs"]
        where = self._row(looked, found, num_rows=len(right[found.name]))
        return [f"{name}: first in {found.name}, {where}, by {found.by:.2g} of its length; all before agrees ({found.largest_before:.1g})"]

    def _row(self, looked: Looked, found: Deviation, *, num_rows: int) -> str:
        if found.row < 0:
            return f"{looked}: another number of rows"
        if not is_of_tower(found.name):
            return f"{looked} {self._token(looked, found.row)}"
        counts = list(accumulate(image.num_patches for image in looked.context.images))
        place = found.row * counts[-1] // num_rows
        number = next(number for number, count in enumerate(counts) if place < count)
        return f"{looked} picture {number} ({looked.context.images[number].key[:8]})"

    def _positions(self, looked: Sequence[Looked]) -> Checked:
        result = Checked("rotary positions", num=len(looked))
        for each in looked:
            ours, theirs = self.spec.positions(each.context.token_ids, each.context.images), self.reference.positions(each)
            wrong = (ours != theirs.cpu()).any(0).nonzero()
            if len(wrong):
                place = int(wrong[0])
                said = f"{ours[:, place].tolist()}, Hugging Face counts {theirs[:, place].tolist()}"
                result.found.append(f"{each} {self._token(each, place)}: {said}")
        return result

    def _tensors(self, trainer: Trainer, name: str) -> Checked:
        """What the trainer would send to engines is what the source holds."""
        result = Checked(name, unit="tensors")
        for tensor_name, tensor in trainer.hf_weights():
            result.num += 1
            stored = self.source.read(tensor_name).float()
            gap = (tensor.detach().float().cpu() - stored).abs().max().item() if tensor.shape == stored.shape else float("inf")
            if gap != 0.0:
                result.found.append(f"{tensor_name}: is not that of the weights, by up to {gap:.3g}{self._stale(tensor_name, tensor)}")
        return result

    def _stale(self, name: str, tensor: torch.Tensor) -> str:
        if self.older is None or not torch.equal(self.older.read(name).float(), tensor.detach().float().cpu()):
            return ""
        return "; it is stale: it is that of the older weights"

    def _moved(self) -> list[Checked]:
        """Where nearly all tensors have moved since the older weights, those that have not."""
        if self.older is None or self.settings.trains_parts:
            return []
        weights = self.reference.weights
        moved = set(moved_tensors(weights, self.older))
        still = sorted(set(weights.names) - moved)
        result = Checked("weights that moved", num=len(moved), unit="tensors")
        if len(still) * 10 <= len(moved):
            result.found += [f"{name}: is as in the older weights, {len(moved)} others have moved" for name in still]
        return [result]


def _then(looked: Looked) -> torch.Tensor | None:
    """What the trainer said at the time, of a context that it was asked of."""
    old = looked.context.old_logprobs
    return torch.tensor([old[row + 1] for row in looked.rows], dtype=torch.float64) if old else None
