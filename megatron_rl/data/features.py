"""Column types that the `datasets` library stores in Parquet and Arrow schemas (key `huggingface`).

Example: {"info": {"features": {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"],
"_type": "ClassLabel"}}}}.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

MEDIA = ("Image", "Video", "Audio")
_KEY = b"huggingface"

Features = Mapping[str, object]
"""Maps each column to its type as described in the schema."""


def parse_features(metadata: Mapping[bytes, bytes] | None) -> Features:
    """Return the column types stored in a schema, or an empty mapping if there are none."""
    try:
        info = json.loads((metadata or {}).get(_KEY, b"{}"))
    except (ValueError, RecursionError):
        return {}
    features = info.get("info", {}).get("features", {}) if isinstance(info, dict) and isinstance(info.get("info", {}), dict) else {}
    return features if isinstance(features, dict) else {}


def media_types(features: Features) -> dict[str, str]:
    """Map each column with images, videos or audio to its media type.

    Lists of media are included, and fields of structs are named `column.field`.
    """
    return {path: kind for name, feature in features.items() for path, kind in _media_in(feature, name)}


def _media_in(feature: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(feature, list) and feature:
        yield from _media_in(feature[0], path)
    if not isinstance(feature, Mapping):
        return
    kind = feature.get("_type")
    if isinstance(kind, str) and kind in MEDIA:
        yield path, kind
    elif isinstance(kind, str):
        yield from _media_in(feature.get("feature"), path)
    else:
        for name, inner in feature.items():
            yield from _media_in(inner, f"{path}.{name}")


def repeated_name(fields: Iterable[pa.Field]) -> str:
    """Return a name that two columns or two fields of a struct share, or "" if all are unique."""
    fields = list(fields)
    twice = [name for name, count in Counter(field.name for field in fields).items() if count > 1]
    return next(iter(twice), "") or next((name for field in fields if (name := repeated_name(_fields_of(field.type)))), "")


def _fields_of(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(number) for number in range(kind.num_fields)]


def name_labels(value: object, feature: object) -> object:
    """Replace integer class labels with their names, at any depth.

    The value -1, which `datasets` uses for a missing label, becomes None.
    """
    if isinstance(feature, list) and feature:
        feature = {"_type": "List", "feature": feature[0]}
    if not isinstance(feature, Mapping) or value is None:
        return value
    names = feature.get("names")
    if feature.get("_type") == "ClassLabel" and isinstance(names, list) and isinstance(value, int):
        return names[value] if 0 <= value < len(names) else None if value == -1 else value
    if isinstance(value, list) and "feature" in feature:
        return [name_labels(item, feature["feature"]) for item in value]
    if isinstance(value, dict):
        inner = feature.get("feature") if feature.get("_type") == "Sequence" else feature
        return {key: name_labels(item, inner.get(key)) for key, item in value.items()} if isinstance(inner, Mapping) else value
    return value
