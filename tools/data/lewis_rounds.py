"""Generates rounds of the Lewis game from images in folders <category>/<concept>/.

A catalogue lists the images of each concept. Concepts are split into train and test, and rounds are
generated for each split, following the game's reference code (Deepayan137/Lewis_Game 621d687). The
target of a round is another view of the query's concept, by default the view that is least similar
to the query. The distractors are taken from the concepts whose average image embeddings are nearest
to the average embedding of the query's concept. Concepts of the query's category are chosen first.
Each of the chosen concepts contributes the image that is nearest to the query.
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
"""Image paths relative to the root folder, keyed by category and then by concept."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROBLEM_TEMPLATE = "Do the two images show the same {category}, and not only one of the same kind?"
DISTRACTORS = ("nearest", "random")
POSITIVES = ("most_dissimilar", "most_similar", "random", "mixed")
DEFAULT_EASY_SHARE = 0.5
SPLITS = ("train", "test")
ANY_CATEGORY = "object"
THUMBNAIL_SIDE = 8
"""Side length in pixels of the thumbnails that serve as embeddings if no encoder is given."""


def read_catalogue(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the catalogue of a folder.

    Raises:
        ValueError: The folder has no images, or a concept has only one image and thus no other
            view.
    """
    found = _read_folder(root, root)
    require_views(found, root)
    return found


def read_split_catalogues(root: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the catalogues of train/ and test/, or {} if one of these folders is missing.

    The datasets PerVA and YoLLaVA have this layout, with categories below the splits. If a split
    has no categories, all concepts of the split are put into the category `object`.

    Raises:
        ValueError: There are images in other folders next to train/ and test/.
    """
    if not all((root / split).is_dir() for split in SPLITS):
        return {}
    others = sorted({path.relative_to(root).parts[0] for path in _list_images(root, "*/*/*")} - {*SPLITS})
    require(not others, "--pictures", root, f"has train/ and test/, but also images in {others[0] if others else ''}/; move these images")
    return {split: _read_folder(root / split, root) for split in SPLITS}


def find_shared_concepts(splits: Mapping[str, Catalogue]) -> list[str]:
    """Return the concepts that are in both train and test, as <category>/<concept>."""
    train, test = ({f"{category}/{concept}" for category in splits[name] for concept in splits[name][category]} for name in SPLITS)
    return sorted(train & test)


def merge_catalogues(splits: Mapping[str, Catalogue]) -> dict[str, dict[str, list[str]]]:
    """Return one catalogue that contains the images of all splits."""
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
    """Return the catalogue of a folder with the layout <category>/<concept>/.

    In a subfolder of `root`, such as train/, the level <category>/ may be missing. Paths in the
    result are relative to `root`.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for path in _list_images(folder, "*/*/*"):
        category, concept, _ = path.relative_to(folder).parts
        found.setdefault(category, {}).setdefault(concept, []).append(str(path.relative_to(root)))
    if not found and folder != root:
        for path in _list_images(folder, "*/*"):
            found.setdefault(ANY_CATEGORY, {}).setdefault(path.parent.name, []).append(str(path.relative_to(root)))
    return found


def require_views(catalogue: Catalogue, folder: Path) -> None:
    """Raise ValueError unless there are concepts and each concept has at least two images."""
    require(bool(catalogue), "--pictures", folder, "has no images in folders <category>/<concept>/")
    single = [f"{category}/{concept}" for category, concepts in catalogue.items() for concept, paths in concepts.items() if len(paths) < 2]
    require(not single, "--pictures", folder, f"must have at least two images of each concept; only one found for {', '.join(single[:3])}")


def split_by_concept(catalogue: Catalogue, *, share: float, least: int, seed: int) -> dict[str, dict[str, dict[str, Sequence[str]]]]:
    """Split the concepts of each category into train and test; no concept is in both splits.

    `share` is the fraction of concepts that are assigned to train. A category with fewer than
    `least` concepts, or with a single concept, is left out.

    Raises:
        ValueError: No category has enough concepts.
    """
    require(0 < share < 1, "--train-share", share, "must be between 0 and 1")
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
    require(bool(splits["train"]), "--pictures", sorted(catalogue), f"no category has at least {max(least, 2)} concepts; add concepts")
    return splits


def open_image(path: Path) -> Picture:
    """Open an image as in training: convert the image to RGB and rotate it upright.

    Raises:
        ValueError: The file is not an image or is truncated; the error names the file.
    """
    try:
        return StoredImage(path, str(path)).open()
    except InfraError as error:
        raise ValueError(f"{error}; remove the file, or save the image again") from error


def embed_thumbnails(paths: Sequence[Path]) -> np.ndarray:
    """Return color thumbnails as embeddings: float32 [N, 3 * THUMBNAIL_SIDE^2].

    The average value of each thumbnail is subtracted from its values, and each row is normalized to
    length 1.
    """
    rows = []
    for path in paths:
        small = np.asarray(open_image(path).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX), dtype=np.float32).ravel()
        rows.append(small - small.mean())
    return normalize_rows(np.stack(rows))


def normalize_rows(rows: np.ndarray) -> np.ndarray:
    """Normalize each row to length 1."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


@dataclass(frozen=True, slots=True)
class GameRound:
    """One round of the game: query image, candidate images and index of the target candidate."""

    category: str
    concept: str
    query: str
    candidates: Sequence[str]
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundGenerator:
    """Generates the rounds of one split from the split's catalogue and image embeddings."""

    catalogue: Catalogue
    embeddings: Mapping[str, np.ndarray]
    """Embedding of each image, normalized to length 1 and keyed by image path."""
    num_candidates: int = 3
    positive: str = "most_dissimilar"
    easy_share: float = DEFAULT_EASY_SHARE
    """Fraction of rounds with the most similar view as target; used if `positive` is "mixed".

    In the other rounds, the target is the most dissimilar view.
    """
    distractors: str = "nearest"
    cross_share: float = 0.0
    """Fraction of rounds with distractors from categories other than the query's category.

    If the other categories have too few concepts, the remaining distractors are taken from the
    query's category.
    """

    def __post_init__(self) -> None:
        num = sum(map(len, self.catalogue.values()))
        require(
            2 <= self.num_candidates <= num,
            "--candidates",
            self.num_candidates,
            f"must be between 2 and {num}, the number of concepts in a split",
        )
        require(0 <= self.easy_share <= 1, "--easy-share", self.easy_share, "must be from 0 to 1")
        is_used = self.positive == "mixed" or self.easy_share == DEFAULT_EASY_SHARE
        require(is_used, "--easy-share", self.easy_share, "requires --positive mixed")
        require(
            self.num_candidates <= len(LETTERS),
            "--candidates",
            self.num_candidates,
            f"must be at most {len(LETTERS)}, the number of letters",
        )

    def generate_rounds(self, *, seed: int, queries: int) -> Iterator[GameRound]:
        """Yield the rounds, with at most `queries` random images per concept as query images."""
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
        """Choose the distractors for a query.

        If `is_cross` is True, concepts of other categories are preferred; otherwise, concepts of
        the query's category are preferred. Among equally preferred concepts, the concepts nearest
        to the query's concept are chosen, with the images nearest to the query. If the random
        generator `drawn` is given, the choice of concepts and images is random.
        """
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
    """Return the row of the speaker's dataset for one round."""
    names = list(LETTERS[: len(game_round.candidates)])
    return {
        "image": _make_image_value(root, game_round.query), "ret_paths": list(game_round.candidates), "names": names,
        "speaker_problem": PROMPT.format(category=game_round.category), "solution": names[game_round.target],
        "category": game_round.category,
        "concept": game_round.concept,
    }  # fmt: skip


def make_listener_row(game_round: GameRound, root: Path, *, same: bool) -> dict[str, object]:
    """Return a row of the listener's dataset for one round.

    If `same` is True, the row pairs the query with the target of the round; otherwise it pairs the
    query with the first distractor of the round.
    """
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
