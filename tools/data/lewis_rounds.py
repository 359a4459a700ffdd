"""Rounds of the Lewis game from folders <category>/<concept>/ of pictures: a catalogue, a split by concept, hard negatives.

The order of the game's own pipeline (Deepayan137/Lewis_Game 621d687): of a query's concept another view is the target, the least similar
one unless chosen otherwise; distractors are of the nearest other concepts by the mean of their pictures, and of each the picture nearest to
the query. Concepts of one category come before all others.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.Image import Image as Picture

from megatron_rl.config import require
from megatron_rl.data.images import FORMATS, StoredImage
from megatron_rl.errors import InfraError
from megatron_rl.tasks.lewis.description import PROMPT

Catalogue = Mapping[str, Mapping[str, Sequence[str]]]
"""Category -> concept -> its pictures, relative to the root."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROBLEM_TEMPLATE = "Do the two images show the same {category}, and not only one of the same kind?"
DISTRACTORS = ("nearest", "random")
POSITIVES = ("most_dissimilar", "most_similar", "random", "mixed")
DEFAULT_EASY_SHARE = 0.5
SPLITS = ("train", "test")
ANY_CATEGORY = "object"
THUMBNAIL_SIDE = 8
"""Of the thumbnail that stands for a picture where no encoder is given."""


def read_catalogue(root: Path) -> dict[str, dict[str, list[str]]]:
    """ValueError: there is none, or a concept has one picture and so no other view."""
    found = _read_folder(root, root)
    require_views(found, root)
    return found


def read_split_catalogues(root: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Catalogues of the folders train/ and test/ above the categories, as PerVA and YoLLaVA lie; empty where those folders are not there.
    Where concepts stand there without categories, all are of one, `object`. ValueError: other pictures lie beside them."""
    if not all((root / split).is_dir() for split in SPLITS):
        return {}
    beside = sorted({path.relative_to(root).parts[0] for path in _list_images(root, "*/*/*")} - {*SPLITS})
    require(not beside, "--pictures", root, f"has train/ and test/ and, beside them, pictures in {beside[0] if beside else ''}/; move them")
    return {split: _read_folder(root / split, root) for split in SPLITS}


def find_shared_concepts(splits: Mapping[str, Catalogue]) -> list[str]:
    """Concepts of train that are also of test: <category>/<concept>."""
    train, test = ({f"{category}/{concept}" for category in splits[name] for concept in splits[name][category]} for name in SPLITS)
    return sorted(train & test)


def merge_catalogues(splits: Mapping[str, Catalogue]) -> dict[str, dict[str, list[str]]]:
    """One catalogue of the pictures of all."""
    found: dict[str, dict[str, list[str]]] = {}
    for catalogue in splits.values():
        for category, concepts in catalogue.items():
            for concept, paths in concepts.items():
                found.setdefault(category, {}).setdefault(concept, []).extend(paths)
    return found


def _list_images(root: Path, depth: str) -> list[Path]:
    suffixes = {suffix for suffix, form in Image.registered_extensions().items() if form in FORMATS}
    return [path for path in sorted(root.glob(depth)) if path.suffix.casefold() in suffixes and path.is_file()]


def _read_folder(folder: Path, root: Path) -> dict[str, dict[str, list[str]]]:
    """Of <category>/<concept>/, or of <concept>/ alone below a split's folder; paths are relative to `root`."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in _list_images(folder, "*/*/*"):
        category, concept, _ = path.relative_to(folder).parts
        found.setdefault(category, {}).setdefault(concept, []).append(str(path.relative_to(root)))
    if not found and folder != root:
        for path in _list_images(folder, "*/*"):
            found.setdefault(ANY_CATEGORY, {}).setdefault(path.parent.name, []).append(str(path.relative_to(root)))
    return found


def require_views(catalogue: Catalogue, folder: Path) -> None:
    """ValueError: there is no concept in it, or one has one picture and so no other view."""
    require(bool(catalogue), "--pictures", folder, "has no pictures in folders <category>/<concept>/")
    single = [f"{category}/{concept}" for category, concepts in catalogue.items() for concept, paths in concepts.items() if len(paths) < 2]
    require(not single, "--pictures", folder, f"needs two views of each concept; {', '.join(single[:3])} has one picture")


def split_by_concept(catalogue: Catalogue, *, share: float, least: int, seed: int) -> dict[str, dict[str, dict[str, Sequence[str]]]]:
    """Catalogues of train and test: `share` of each category's concepts are for training, and no concept is in both. A category of fewer
    than `least` concepts is left out. ValueError: nothing is left for one of them."""
    require(0 < share < 1, "--train-share", share, "must lie between 0 and 1")
    dice = random.Random(seed)
    splits: dict[str, dict[str, dict[str, Sequence[str]]]] = {"train": {}, "test": {}}
    for category, concepts in sorted(catalogue.items()):
        names = sorted(concepts)
        dice.shuffle(names)
        if len(names) < max(least, 2):
            continue
        num = min(max(round(share * len(names)), 1), len(names) - 1)
        for split, chosen in (("train", names[:num]), ("test", names[num:])):
            splits[split][category] = {name: concepts[name] for name in sorted(chosen)}
    require(bool(splits["train"]), "--pictures", sorted(catalogue), f"no category has {max(least, 2)} concepts; give more")
    return splits


def open_image(path: Path) -> Picture:
    """As a run shows it: RGB, upright. ValueError names a file that is no picture, or half of one."""
    try:
        return StoredImage(path, str(path)).open()
    except InfraError as error:
        raise ValueError(f"{error}; take it away, or save it anew") from error


def embed_thumbnails(paths: Sequence[Path]) -> np.ndarray:
    """float32 [N, 3 * SIDE^2] of length 1: colors and where they are, mean taken away."""
    rows = []
    for path in paths:
        small = np.asarray(open_image(path).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX), dtype=np.float32).ravel()
        rows.append(small - small.mean())
    return normalize_rows(np.stack(rows))


def normalize_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


@dataclass(frozen=True, slots=True)
class GameRound:
    category: str
    concept: str
    query: str
    candidates: Sequence[str]
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundGenerator:
    """Rounds of one split's catalogue, whose pictures are `embeddings` by path."""

    catalogue: Catalogue
    embeddings: Mapping[str, np.ndarray]
    """Of length 1."""
    num_candidates: int = 3
    positive: str = "most_dissimilar"
    easy_share: float = DEFAULT_EASY_SHARE
    """Of mixed rounds, whose targets are most similar; those of the others are most dissimilar."""
    distractors: str = "nearest"
    cross_share: float = 0.0
    """Of the rounds whose distractors are of other categories, as near as may be; of their own, where there are too few others."""

    def __post_init__(self) -> None:
        num = sum(map(len, self.catalogue.values()))
        require(2 <= self.num_candidates <= num, "--candidates", self.num_candidates, f"must be from 2 to the {num} concepts of a split")
        require(0 <= self.easy_share <= 1, "--easy-share", self.easy_share, "is a share; give 0 to 1")
        is_used = self.positive == "mixed" or self.easy_share == DEFAULT_EASY_SHARE
        require(is_used, "--easy-share", self.easy_share, "is of --positive mixed: give that, too")
        require(self.num_candidates <= len(LETTERS), "--candidates", self.num_candidates, f"at most {len(LETTERS)} have letters")

    def generate_rounds(self, *, seed: int, queries: int) -> Iterator[GameRound]:
        """`queries` pictures of each concept at most, drawn, each as the query of one round."""
        dice, means = random.Random(seed), self._concept_means()
        for category, concepts in self.catalogue.items():
            for concept, paths in concepts.items():
                for query in dice.sample(list(paths), min(queries, len(paths))):
                    is_cross = dice.random() < self.cross_share
                    target = self._choose_other_view(query, paths, dice)
                    drawn = dice if self.distractors == "random" else None
                    candidates = [target, *self._choose_distractors(category, concept, query, means, is_cross=is_cross, drawn=drawn)]
                    dice.shuffle(candidates)
                    yield GameRound(category, concept, query, candidates, candidates.index(target))

    def _concept_means(self) -> dict[tuple[str, str], np.ndarray]:
        found = {
            (category, concept): np.mean([self.embeddings[path] for path in paths], axis=0)
            for category, concepts in self.catalogue.items()
            for concept, paths in concepts.items()
        }
        return dict(zip(found, normalize_rows(np.stack(list(found.values()))), strict=True))

    def _choose_other_view(self, query: str, paths: Sequence[str], rng: random.Random) -> str:
        others = [path for path in paths if path != query]
        if self.positive == "random":
            return rng.choice(others)
        is_easy = self.positive == "most_similar" or (self.positive == "mixed" and rng.random() < self.easy_share)
        pick = max if is_easy else min
        return pick(others, key=lambda path: float(self.embeddings[path] @ self.embeddings[query]))

    def _choose_distractors(
        self, category: str, concept: str, query: str, means: Mapping[tuple[str, str], np.ndarray], *, is_cross: bool,
        drawn: random.Random | None,
    ) -> list[str]:  # fmt: skip
        """With `drawn`, any pictures of other concepts; those of the same category first, of other categories if it is_cross."""
        if drawn is not None:
            keys = drawn.sample([key for key in means if key != (category, concept)], len(means) - 1)
            keys.sort(key=lambda key: (key[0] != category) != is_cross)
            return [drawn.choice(list(self.catalogue[of][name])) for of, name in keys[: self.num_candidates - 1]]
        own = means[category, concept]
        near = sorted(
            (key for key in means if key != (category, concept)),
            key=lambda key: ((key[0] != category) != is_cross, -float(means[key] @ own), key),
        )
        return [
            max(self.catalogue[of][name], key=lambda path: float(self.embeddings[path] @ self.embeddings[query]))
            for of, name in near[: self.num_candidates - 1]
        ]


def make_speaker_row(game_round: GameRound, root: Path) -> dict[str, object]:
    names = list(LETTERS[: len(game_round.candidates)])
    return {
        "image": _make_image_value(root, game_round.query), "ret_paths": list(game_round.candidates), "names": names,
        "speaker_problem": PROMPT.format(category=game_round.category), "solution": names[game_round.target],
        "category": game_round.category,
        "concept": game_round.concept,
    }  # fmt: skip


def make_listener_row(game_round: GameRound, root: Path, *, same: bool) -> dict[str, object]:
    """The query beside the round's target, or beside its first distractor."""
    others = [path for place, path in enumerate(game_round.candidates) if place != game_round.target]
    reference = game_round.candidates[game_round.target] if same else others[0]
    return {
        "query_image": _make_image_value(root, game_round.query), "query_image_path": game_round.query,
        "reference_image": _make_image_value(root, reference), "reference_image_path": reference,
        "listener_problem": PROBLEM_TEMPLATE.format(category=game_round.category), "listener_solution": "yes" if same else "no",
        "category": game_round.category, "concept": game_round.concept,
    }  # fmt: skip


def _make_image_value(root: Path, path: str) -> dict[str, object]:
    return {"bytes": (root / path).read_bytes(), "path": path}
