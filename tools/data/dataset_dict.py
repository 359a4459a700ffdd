"""Writes a DatasetDict in the format of `datasets` 5.2, without using that package.

The files have the layout of save_to_disk and can be read with load_from_disk:

    OUT/dataset_dict.json
    OUT/train/{data-00000-of-00001.arrow, dataset_info.json, state.json}
    OUT/test/...
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

STRING, IMAGE = {"dtype": "string", "_type": "Value"}, {"_type": "Image"}
STRINGS = {"feature": STRING, "_type": "List"}
_ARROW = {
    json.dumps(STRING): pa.string(), json.dumps(STRINGS): pa.list_(pa.string()),
    json.dumps(IMAGE): pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
}  # fmt: skip
_FILE = "data-00000-of-00001.arrow"


def write_dataset_dict(
    out: Path, splits: Mapping[str, Sequence[Mapping[str, object]]], features: Mapping[str, Mapping[str, object]]
) -> None:
    """Write the rows of each split to `out`.

    `features` maps each column to STRING, STRINGS or IMAGE; the order of `features` is the column
    order.
    """
    for split, rows in splits.items():
        folder = out / split
        folder.mkdir(parents=True)
        info = {"features": features}
        fields = [(name, _ARROW[json.dumps(feature)]) for name, feature in features.items()]
        schema = pa.schema(fields, metadata={"huggingface": json.dumps({"info": info})})
        table = pa.Table.from_pylist(list(rows), schema=schema)
        with pa.OSFile(str(folder / _FILE), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        fingerprint = hashlib.sha256((folder / _FILE).read_bytes()).hexdigest()[:16]
        plain = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state = {
            "_data_files": [{"filename": _FILE}], "_fingerprint": fingerprint, "_format_columns": None, "_format_kwargs": {},
            "_format_type": None, "_output_all_columns": False, "_split": split,
        }  # fmt: skip
        (folder / "dataset_info.json").write_text(json.dumps(plain, indent=2))
        (folder / "state.json").write_text(json.dumps(state, indent=2))
    (out / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
