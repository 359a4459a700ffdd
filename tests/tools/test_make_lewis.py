"""Rounds of the Lewis game. Oracles: colors drawn by the test, counts by hand, and the `datasets`
package if it is installed.
"""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from megatron_rl.data.records import RecordFiles
from megatron_rl_tools.data import make_emoji
from megatron_rl_tools.data.lewis_rounds import RoundGenerator, read_catalogue, split_by_concept
from megatron_rl_tools.data.make_lewis import LISTENER_FEATURES, main


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two categories of five concepts with four images each. Concepts with adjacent numbers
    have similar images.
    """
    root = tmp_path_factory.mktemp("pictures")
    for category, base in (("red", (120, 0, 0)), ("blue", (0, 0, 120))):
        for concept in range(5):
            folder = root / category / f"shade{concept}"
            folder.mkdir(parents=True)
            for view in range(4):
                picture = Image.new("RGB", (32, 32), base)
                pen = ImageDraw.Draw(picture)
                pen.rectangle((0, 0, 6 * concept + 2, 31), fill=tuple(part + 60 for part in base))
                pen.rectangle((0, 0, 31, view), fill="white")
                picture.save(folder / f"{view}.png")
    return root


@pytest.fixture(scope="module")
def rounds(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "rounds"
    assert main(["--pictures", str(pictures), "--out", str(out), "--train-share", "0.6", "--queries", "3"]) == 0
    return out


def test_no_concept_is_in_both_splits(pictures: Path) -> None:
    catalogue = read_catalogue(pictures)
    assert {category: len(concepts) for category, concepts in catalogue.items()} == {"red": 5, "blue": 5}
    seen = set()
    for seed in range(6):
        splits = split_by_concept(catalogue, share=0.6, least=3, seed=seed)
        names = {split: {(a, b) for a in found for b in found[a]} for split, found in splits.items()}
        assert len(names["train"]) == 6 and len(names["test"]) == 4 and not names["train"] & names["test"]
        seen.add(frozenset(names["test"]))
    assert len(seen) > 3
    (small,) = [split_by_concept({**catalogue, "two": {"a": ["1", "2"], "b": ["1", "2"]}}, share=0.6, least=3, seed=0)]
    assert "two" not in small["train"] and "two" not in small["test"]


def test_distractors_are_hard_and_the_target_is_another_view(pictures: Path) -> None:
    """The embeddings lie on an arc. The distractors are the two nearest concepts of the category,
    each with its nearest image; the target is the farthest view of the same concept. With
    cross_share=1, a concept of the other category is the first distractor.
    """
    catalogue = {"x": {name: [f"{name}{view}" for view in range(3)] for name in "abc"}, "y": {"d": ["d0", "d1"]}}
    angles = {"a": 0.0, "b": 0.5, "c": 1.0, "d": 0.2}
    embeddings = {
        path: np.array([np.cos(angle), np.sin(angle)]) for found in catalogue.values() for name, paths in found.items()
        for view, path in enumerate(paths) for angle in [angles[name] + 0.01 * view]
    }  # fmt: skip
    dealt = list(RoundGenerator(catalogue=catalogue, embeddings=embeddings).generate_rounds(seed=0, queries=3))
    by_query = {each.query: each for each in dealt}
    assert len(by_query) == 11
    assert set(by_query["a0"].candidates) == {"a2", "b0", "c0"} and by_query["a0"].candidates[by_query["a0"].target] == "a2"
    assert set(by_query["c1"].candidates) == {"c0", "b2", "a2"} or set(by_query["c1"].candidates) == {"c2", "b2", "a2"}
    assert set(by_query["d0"].candidates) == {"d1", "a2", "b0"}
    crossed = {
        each.query: each
        for each in RoundGenerator(catalogue=catalogue, embeddings=embeddings, cross_share=1.0).generate_rounds(seed=0, queries=3)
    }
    assert set(crossed["a0"].candidates) == {"a2", "d0", "b0"}
    far = embeddings | {name: -embeddings[name] for name in ("d0", "d1")}
    for distractors in ("nearest", "random"):
        crossed = RoundGenerator(catalogue=catalogue, embeddings=far, cross_share=1.0, distractors=distractors).generate_rounds(
            seed=0, queries=3
        )
        assert all({"d0", "d1"} & set(each.candidates) for each in crossed), "however far it is"
    similar = RoundGenerator(catalogue=catalogue, embeddings=embeddings, positive="most_similar", num_candidates=2)
    (first,) = [each for each in similar.generate_rounds(seed=0, queries=3) if each.query == "a0"]
    assert set(first.candidates) == {"a1", "b0"}

    def targets(positive: str, easy_share: float = 0.5) -> dict[str, str]:
        dealer = RoundGenerator(catalogue=catalogue, embeddings=embeddings, positive=positive, easy_share=easy_share)
        return {each.query: each.candidates[each.target] for each in dealer.generate_rounds(seed=0, queries=3)}

    easy, hard, mixed = targets("most_similar"), targets("most_dissimilar"), targets("mixed")
    assert targets("mixed", 1.0) == easy and targets("mixed", 0.0) == hard != easy
    assert all(target in (easy[query], hard[query]) for query, target in mixed.items()) and mixed not in (easy, hard)
    assert len({each.target for each in dealt}) == 3


def test_the_rounds_have_the_games_columns(rounds: Path, pictures: Path) -> None:
    """The rounds, read back with RecordFiles, have 3 queries for each of the 6 and 4 concepts. Half
    of the listener's rows show the same object twice.
    """
    for split, count in (("train", 18), ("test", 12)):
        records = RecordFiles([f"{rounds}/speaker:{split}"], images_root=str(pictures))
        assert len(records) == count
        for record in (records[place] for place in range(count)):
            row = record.row
            assert list(row) == ["image", "ret_paths", "names", "speaker_problem", "solution", "category", "concept"]
            assert row["names"] == ["A", "B", "C"] and len({*row["ret_paths"]}) == 3
            target = row["ret_paths"]["ABC".index(row["solution"])]
            assert target.startswith(f"{row['category']}/{row['concept']}/") and target != row["image"]["path"]
            assert row["image"]["bytes"] == (pictures / row["image"]["path"]).read_bytes()
            assert {path.split("/")[0] for path in row["ret_paths"]} == {row["category"]} or split == "test"
        compared = RecordFiles([f"{rounds}/listener:{split}"], images_root=str(pictures))
        same = [compared[place].row for place in range(count)]
        assert list(same[0]) == list(LISTENER_FEATURES)
        assert sum(row["listener_solution"] == "yes" for row in same) == count // 2
        for row in same:
            concepts = {Path(row[f"{which}_image_path"]).parent for which in ("query", "reference")}
            assert (len(concepts) == 1) == (row["listener_solution"] == "yes") and row["query_image_path"] != row["reference_image_path"]


def test_datasets_reads_what_is_written_and_its_own_is_read(rounds: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="without datasets its reader was NOT asked")
    loaded = datasets.load_from_disk(str(rounds / "speaker"))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 18, "test": 12}
    assert loaded["train"].features["image"] == datasets.Image() and loaded["train"][0]["image"].size == (32, 32)
    loaded.save_to_disk(str(tmp_path / "again"))
    ours = RecordFiles([f"{rounds}/speaker:train"], images_root=str(rounds))
    theirs = RecordFiles([f"{tmp_path}/again:train"], images_root=str(rounds))
    for ours_row, theirs_row in ((ours[place].row, theirs[place].row) for place in range(18)):
        image = {**ours_row["image"], "path": Path(ours_row["image"]["path"]).name}  # datasets 5.2 stores only the name (features/image.py)
        assert {**ours_row, "image": image} == theirs_row


def test_the_same_arguments_write_the_same_bytes(rounds: Path, pictures: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["--pictures", str(pictures), "--out", str(again), "--train-share", "0.6", "--queries", "3"]) == 0
    assert files_of(again) == files_of(rounds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--candidates", "9"], "--candidates=9: must be between 2 and 6, the number of concepts in a split"),
        (["--candidates", "1"], "--candidates=1: must be between 2"),
        (["--easy-share", "0.9"], "--easy-share=0.9: requires --positive mixed"),
        (["--easy-share", "1.5"], "--easy-share=1.5: must be from 0 to 1"),
        (["--train-share", "1"], "--train-share=1.0: must be between 0 and 1"),
        (["--least-concepts", "9"], "no category has at least 9 concepts"),
    ],
)
def test_what_cannot_be_built_is_told(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture, change: list[str], said: str) -> None:
    assert main(["--pictures", str(pictures), "--out", str(tmp_path / "x"), "--train-share", "0.6", *change]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("content", [b"no picture", b"half"])
def test_a_picture_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes) -> None:
    """A damaged image file is named in the error, both with color embeddings and with an encoder.
    The error does not blame --out, and nothing is written.
    """
    root = split_folders(tmp_path / "p", mug=["a", "b", "c"])
    spoilt = root / "mug" / "b" / "1.jpg"
    spoilt.write_bytes(content if content != b"half" else spoilt.read_bytes()[:300])
    encoder = tmp_path / "encoder"
    ViTImageProcessor().save_pretrained(encoder)
    ViTModel(
        ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8), add_pooling_layer=False
    ).save_pretrained(encoder)
    for words in ([], ["--encoder", str(encoder)]):
        assert main(["--pictures", str(root), "--out", str(tmp_path / "x"), *words]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: {spoilt}: cannot be opened (") and "--out" not in said and not (tmp_path / "x").exists()


def test_a_concept_of_one_picture_is_told(tmp_path: Path) -> None:
    (tmp_path / "mug" / "mine").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "mug" / "mine" / "0.png")
    with pytest.raises(ValueError, match=r"must have at least two images of each concept; only one found for mug/mine"):
        read_catalogue(tmp_path)
    with pytest.raises(ValueError, match=r"has no images in folders"):
        read_catalogue(tmp_path / "mug")


def split_folders(root: Path, **concepts: list[str]) -> Path:
    """Create root/<split>/<folder>/ with two images each; every image has its own color."""
    for split, names in concepts.items():
        for name in names:
            (root / split / name).mkdir(parents=True)
            for view in range(2):
                color = hashlib.sha256(f"{split}{name}{view}".encode()).digest()[:3]
                Image.new("RGB", (16, 16), tuple(color)).save(root / split / name / f"{view}.jpg")
    return root


def splits_made(root: Path, out: Path, *words: str) -> dict[str, set[str]]:
    """Run make_lewis; return {split: concepts of the speaker's rounds as <category>/<concept>}.
    Without --resplit, assert that all images of a round come from its split.
    """
    assert main(["--pictures", str(root), "--out", str(out), *words]) == 0
    found: dict[str, set[str]] = {}
    for split in ("train", "test"):
        rows = rows_of(out, split, root)
        found[split] = {f"{row['category']}/{row['concept']}" for row in rows}
        if "--resplit" not in words:
            assert {path.split("/")[0] for row in rows for path in (row["image"]["path"], *row["ret_paths"])} == {split}
    return found


def test_train_and_test_above_the_categories_are_the_splits(tmp_path: Path) -> None:
    """The folders train/ and test/ above the categories determine the splits, as in PerVA, and in
    YoLLaVA, where concepts have no category. Options for shares and minimum counts have no effect.
    """
    perva = split_folders(tmp_path / "perva", train=["mug/a", "mug/b", "bag/c"], test=["mug/d", "bag/e", "bag/f"])
    assert splits_made(perva, tmp_path / "one") == {"train": {"mug/a", "mug/b", "bag/c"}, "test": {"mug/d", "bag/e", "bag/f"}}
    plain = split_folders(tmp_path / "yollava", train=["bo", "mam", "pug"], test=["cat", "cup", "duck"])
    assert splits_made(plain, tmp_path / "two") == {
        "train": {"object/bo", "object/mam", "object/pug"},
        "test": {"object/cat", "object/cup", "object/duck"},
    }


def test_a_concept_in_both_splits_is_told_and_can_be_split_anew(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A concept in both splits is an error. With --resplit, the images of both folders are pooled
    and split again; a concept with a single image in one folder then has enough images.
    """
    names = ["mug/a", "mug/b", "mug/c", "mug/d", "mug/e", "mug/f"]
    root = split_folders(tmp_path / "p", train=names, test=["mug/a", "mug/b"])
    assert main(["--pictures", str(root), "--out", str(tmp_path / "x")]) == 1
    assert "mug/a, mug/b (2 concepts in total) in both train/ and test/; use --resplit" in capsys.readouterr().err
    (root / "test" / "mug" / "b" / "1.jpg").unlink()
    found = splits_made(root, tmp_path / "x", "--resplit", "--train-share", "0.5", "--queries", "9")
    assert not found["train"] & found["test"] and found["train"] | found["test"] == {*names}
    rows = [row for split in ("train", "test") for row in rows_of(tmp_path / "x", split, root)]
    queries = {row["image"]["path"] for row in rows}
    assert queries == {str(path.relative_to(root)) for path in root.rglob("*.jpg")}
    plain = split_folders(tmp_path / "plain", mug=["a", "b", "c"])
    assert main(["--pictures", str(plain), "--out", str(tmp_path / "y"), "--resplit"]) == 1
    assert "has no train/ and test/" in capsys.readouterr().err
    (root / "test" / "mug" / "a" / "1.jpg").unlink()
    (root / "mug" / "g").mkdir(parents=True)
    (root / "mug" / "g" / "0.jpg").write_bytes((root / "train" / "mug" / "a" / "0.jpg").read_bytes())
    assert main(["--pictures", str(root), "--out", str(tmp_path / "y")]) == 1
    assert "but also images in mug/" in capsys.readouterr().err


def rows_of(out: Path, split: str, root: Path) -> list[dict[str, object]]:
    records = RecordFiles([f"{out}/speaker:{split}"], images_root=str(root))
    return [records[place].row for place in range(len(records))]


def package_of(names: list[str]) -> bytes:
    """Return an npm package with a disc of its own color for each name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for number, name in enumerate(names):
            picture = Image.new("RGBA", (64, 64))
            ImageDraw.Draw(picture).ellipse((8, 8, 56, 56), fill=(40 * number % 256, 90 * number % 256, 200 - 30 * number, 255))
            content = io.BytesIO()
            picture.save(content, "WEBP", lossless=True)
            info = tarfile.TarInfo(f"package/assets/{name}.webp")
            info.size = len(content.getvalue())
            archive.addfile(info, io.BytesIO(content.getvalue()))
    return file.getvalue()


def test_emoji_become_objects_in_several_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dog, a cat, a pizza and a house are converted; a keycap, a skin tone and an emoji outside
    the categories are skipped. Views differ from each other and are reproducible with the same
    seed.
    """
    package = package_of(["1f415", "1f408", "1f355", "1f3e0", "0023-fe0f-20e3", "1f44d-1f3fb", "2764"])
    monkeypatch.setattr(make_emoji, "SHA256", hashlib.sha256(package).hexdigest())
    file = tmp_path / "package.tgz"
    file.write_bytes(package)
    outs = [tmp_path / name for name in ("a", "b", "c")]
    for out, seed in zip(outs, "001", strict=True):
        assert make_emoji.main(["--out", str(out), "--package", str(file), "--views", "3", "--side", "56", "--seed", seed]) == 0
    written = files_of(outs[0])
    assert sorted(written) == [
        f"{place}/{view}.png"
        for place in ("animal/cat", "animal/dog", "building/house_building", "food/slice_of_pizza")
        for view in range(3)
    ]
    assert files_of(outs[1]) == written != files_of(outs[2])
    assert len({*written.values()}) == 12
    with Image.open(outs[0] / "animal" / "dog" / "0.png") as picture:
        assert picture.size == (56, 56) and picture.mode == "RGB"
    assert make_emoji.main(["--out", str(tmp_path / "d"), "--package", __file__]) == 1
