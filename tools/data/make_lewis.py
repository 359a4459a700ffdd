"""Builds the speaker and listener datasets of the Lewis game.

The input is a folder that contains images in <category>/<concept>/.

The file OUT/catalogue.json lists the images of each category and concept, and the split of each
concept. The folders OUT/speaker and OUT/listener contain DatasetDicts with the splits train and
test and the columns of the game; image paths are relative to --pictures. The file OUT/words.txt
contains texts of games, for tools/data/make_tiny_qwen2_5_vl.py --words.

In half of the listener's rows, both images contain the same object. No concept is in both splits.
The same arguments produce identical files.

If the input folder has train/ and test/ above the categories (PerVA, YoLLaVA), these folders define
the splits. In this case, train/ and test/ may also contain concepts without categories, such as
train/<concept>/. If a concept is in both train/ and test/, use --resplit, which merges the images
of both folders and splits the concepts again.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megatron_rl.config import require
from megatron_rl.tasks.lewis.demonstrations import make_tokenizer_texts
from megatron_rl_tools.commands import run_command
from megatron_rl_tools.data import dataset_dict
from megatron_rl_tools.data.dataset_dict import IMAGE, STRING, STRINGS
from megatron_rl_tools.data.encoders import encode_images
from megatron_rl_tools.data.lewis_rounds import (
    DEFAULT_EASY_SHARE,
    DISTRACTORS,
    POSITIVES,
    Catalogue,
    RoundGenerator,
    embed_thumbnails,
    find_shared_concepts,
    make_listener_row,
    make_speaker_row,
    merge_catalogues,
    read_catalogue,
    read_split_catalogues,
    require_views,
    split_by_concept,
)

SPEAKER_FEATURES = {
    "image": IMAGE, "ret_paths": STRINGS, "names": STRINGS, "speaker_problem": STRING, "solution": STRING, "category": STRING,
    "concept": STRING,
}  # fmt: skip
LISTENER_FEATURES = {
    "query_image": IMAGE, "query_image_path": STRING, "reference_image": IMAGE, "reference_image_path": STRING, "listener_problem": STRING,
    "listener_solution": STRING, "category": STRING, "concept": STRING,
}  # fmt: skip


def make_dataset(
    pictures: Path, out: Path, *, make_generator: Callable[..., RoundGenerator], encoder: Path | None, queries: int, train_share: float,
    least_concepts: int, resplit: bool, seed: int,
) -> dict[str, int]:  # fmt: skip
    """Write all files and return the number of rounds per split.

    `make_generator` takes the catalogue and the embeddings of a split. The other arguments are
    command-line options.

    Raises:
        ValueError: An option is invalid.
    """
    require(not out.exists(), "--out", out, "exists; choose another folder")
    given = read_given_splits(pictures, resplit=resplit)
    catalogue = merge_catalogues(given) if given else read_whole_catalogue(pictures, resplit=resplit)
    splits = given or split_by_concept(catalogue, share=train_share, least=least_concepts, seed=seed)
    paths = [path for concepts in catalogue.values() for views in concepts.values() for path in views]
    absolute = [pictures / path for path in paths]
    rows = encode_images(encoder, absolute) if encoder else embed_thumbnails(absolute)
    embeddings = dict(zip(paths, rows, strict=True))
    rounds_by_split = {
        split: list(make_generator(catalogue=chosen, embeddings=embeddings).generate_rounds(seed=seed, queries=queries))
        for split, chosen in splits.items()
    }
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True)
    dice = random.Random(seed)
    dataset_dict.write_dataset_dict(
        partial / "speaker",
        {split: [make_speaker_row(each, pictures) for each in rounds] for split, rounds in rounds_by_split.items()},
        SPEAKER_FEATURES,
    )
    same = {split: make_balanced_labels(len(rounds), dice) for split, rounds in rounds_by_split.items()}
    compared = {
        split: [make_listener_row(each, pictures, same=is_same) for each, is_same in zip(rounds, same[split], strict=True)]
        for split, rounds in rounds_by_split.items()
    }
    dataset_dict.write_dataset_dict(partial / "listener", compared, LISTENER_FEATURES)
    concept_splits = {
        f"{category}/{concept}": split for split, found in splits.items() for category in found for concept in found[category]
    }
    write_catalogue(partial / "catalogue.json", catalogue, concept_splits)
    (partial / "words.txt").write_text("\n".join(make_tokenizer_texts(sorted(catalogue))) + "\n")
    partial.rename(out)
    return {split: len(rounds) for split, rounds in rounds_by_split.items()}


def read_given_splits(pictures: Path, *, resplit: bool) -> dict[str, Catalogue]:
    """Return the catalogues of train/ and test/, or {} if this tool has to split the concepts.

    Raises:
        ValueError: A concept is in both folders or has a single image, or `resplit` is set but the
            folders are missing.
    """
    splits = read_split_catalogues(pictures)
    require(bool(splits) or not resplit, "--resplit", resplit, f"{pictures} has no train/ and test/; remove --resplit")
    if not splits or resplit:
        return {}
    for split, catalogue in splits.items():
        require_views(catalogue, pictures / split)
    both = find_shared_concepts(splits)
    remedy = f"{', '.join(both[:3])} ({len(both)} concepts in total) in both train/ and test/; use --resplit to split the concepts again"
    require(not both, "--pictures", pictures, remedy)
    return splits


def read_whole_catalogue(pictures: Path, *, resplit: bool) -> Catalogue:
    """Return one catalogue of all images; `resplit` merges the catalogues of train/ and test/."""
    if not resplit:
        return read_catalogue(pictures)
    catalogue = merge_catalogues(read_split_catalogues(pictures))
    require_views(catalogue, pictures)
    return catalogue


def make_balanced_labels(num: int, rng: random.Random) -> list[bool]:
    """Return `num` shuffled labels, half True and half False.

    If `num` is odd, there is one more True than False.
    """
    values = [place % 2 == 0 for place in range(num)]
    rng.shuffle(values)
    return values


def write_catalogue(path: Path, catalogue: Mapping[str, object], splits: Mapping[str, str]) -> None:
    """Write the catalogue and the split of each concept as JSON."""
    path.write_text(json.dumps({"catalogue": catalogue, "splits": dict(sorted(splits.items()))}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  python tools/data/make_emoji.py --out data/emoji
  %(prog)s --pictures data/emoji --out data/lewis
  %(prog)s --pictures PerVA --out data/perva --encoder checkpoints/qwen2_vl_7b --cross-share 0.2""",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with images in <category>/<concept>/, at least two per concept; optionally split into train/ and test/",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    kinds = "a transformers model, or model.onnx and its preprocessor_config.json"
    parser.add_argument(
        "--encoder", type=Path, metavar="DIR", help=f"image encoder that measures similarity: {kinds}; default: color thumbnails"
    )
    parser.add_argument("--candidates", type=int, default=3, metavar="K", help="images per round (default %(default)s)")
    parser.add_argument("--queries", type=int, default=4, metavar="N", help="maximum number of rounds per concept (default %(default)s)")
    parser.add_argument(
        "--positive",
        choices=POSITIVES,
        default=POSITIVES[0],
        help="how to choose the target among the other views of the concept (default %(default)s)",
    )
    parser.add_argument(
        "--easy-share",
        type=float,
        default=DEFAULT_EASY_SHARE,
        help="with --positive mixed: fraction of rounds whose target is the most similar view (default %(default)g)",
    )
    parser.add_argument(
        "--distractors",
        choices=DISTRACTORS,
        default=DISTRACTORS[0],
        help="how to choose the concepts of the distractors (default %(default)s)",
    )
    parser.add_argument(
        "--cross-share", type=float, default=0.0, help="fraction of rounds with distractors from other categories (default %(default)g)"
    )
    parser.add_argument(
        "--train-share", type=float, default=0.65, help="fraction of each category's concepts for training (default %(default)g)"
    )
    parser.add_argument(
        "--least-concepts", type=int, default=3, metavar="N", help="skip categories with fewer concepts than this (default %(default)s)"
    )
    parser.add_argument("--resplit", action="store_true", help="merge the images of train/ and test/, and split by concept")
    parser.add_argument("--seed", type=int, default=23)
    given = vars(parser.parse_args(arguments))
    pictures, out = given.pop("pictures"), given.pop("out")
    chosen = {name: given.pop(name) for name in ("positive", "easy_share", "distractors", "cross_share")}
    make_generator = partial(RoundGenerator, num_candidates=given.pop("candidates"), **chosen)

    def made() -> str:
        counts = make_dataset(pictures, out, make_generator=make_generator, **given)
        return f"{counts['train']} training rounds and {counts['test']} test rounds in {out}"

    return run_command(made, out=out)


if __name__ == "__main__":
    sys.exit(main())
