"""Tests that numbers from files keep the digits that a response has. Oracles: the text of the JSON
file, repr of doubles and of numpy's float32, and decimals by hand.
"""

import json
import pickle
import random
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.data.decimal_forms import WrittenNumber, decimal_text, looks_widened, with_decimal_forms
from megatron_rl.data.questions import load_questions
from megatron_rl.data.rows import open_rows
from megatron_rl.rewards.answer import compare_by_rules


def plain(number: object) -> str:
    """Return the number's own text, without an exponent."""
    return format(Decimal(str(number)), "f")


def held_in(value: float, kind: pa.DataType) -> str:
    """Return the text of a column's value. pyarrow returns a float32 as a double."""
    text = decimal_text(with_decimal_forms(pa.array([value], kind)[0].as_py(), kind))
    assert text is not None
    return text


def warnings_of(path: Path) -> list[str]:
    return [line for line in load_questions([str(path)], images_root="", name="train").warnings if "column answer" in line]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()], ids=str)
def test_multiples_of_powers_of_one_half_earn_by_their_own_digits(kind: pa.DataType) -> None:
    """Multiples of 1/256 to 1/8192, such as measurements in binary steps, match their own digits,
    also when added to a whole number.
    """
    values = [whole + k / 2**n for n in range(8, 14) for k in range(1, 4033, 9) for whole in (0, 3)]
    values += [128.015625, 16384.0625, 0.126953125]
    lost = [value for value in values if np.float32(value) == value and compare_by_rules(held_in(value, kind), plain(value)) is not True]
    assert not lost
    assert [held_in(value, kind) for value in values[-3:]] == ["128.015625", "16384.0625", "0.126953125"]


def test_random_numbers_earn_by_their_own_digits() -> None:
    """Doubles become their repr, and float32 values match numpy's digits. Ties are excluded: the
    comparison rounds them half up, and numpy rounds them half to even.
    """
    rng = random.Random(0)
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-4, 12) for _ in range(2000)]
    assert not [value for value in values if held_in(value, pa.float64()) != plain(value)]
    narrow = [np.float32(value) for value in values if abs(value) < 2**20]
    ties = {value for value in narrow if plain(float(value)) == plain(value) + "5"}
    assert not [
        value for value in narrow if value not in ties and compare_by_rules(held_in(float(value), pa.float32()), plain(value)) is not True
    ]


def test_decimals_of_five_digits_survive_32_bits() -> None:
    """Decimals of up to five digits keep their digits in a float32 column, and in a double column
    that was converted from float32, as pandas does silently.
    """
    rng = random.Random(1)
    for _ in range(2000):
        wanted = Decimal(rng.randint(1, 99_999)).scaleb(-rng.randint(0, 6))
        widened = float(np.float32(str(wanted)))
        for kind in (pa.float32(), pa.float64()):
            assert Decimal(held_in(widened, kind)) == wanted
    assert held_in(0.1, pa.float16()) == "0.1"


JSON_NUMBERS = [
    *[("12345678901234567890.5", "12345678901234567890.5"), ("12345678901234567890", "12345678901234567890"), ("3.10", "3.10")],
    *[("1e-5", "0.00001"), ("1.50E+3", "1500"), ("-0.0", "-0.0"), ("0.1000000000000000055", "0.1000000000000000055")],
    *[("1e22", "10000000000000000000000"), ("128.015625", "128.015625")],
]


def test_numbers_of_json_keep_their_digits(tmp_path: Path) -> None:
    """The digits are kept in a column, and in the structs that contain an answer."""
    path = tmp_path / "q.jsonl"
    forms = ('"answer": {}', '"reward_model": {{"ground_truth": {}}}', '"extra_info": {{"answer": {}}}')
    path.write_text("\n".join(f'{{"question": "q", {form.format(text)}}}' for form in forms for text, _ in JSON_NUMBERS))
    found = [example.payload["answer"] for example in load_questions([str(path)], images_root="", name="train")]
    assert found == [wanted for _ in forms for _, wanted in JSON_NUMBERS]
    assert pickle.loads(pickle.dumps(open_rows(path)[2]))["answer"].text == "3.10" and json.dumps(open_rows(path)[2]["answer"]) == "3.1"


@pytest.mark.parametrize("text", ["1e-2000", "1e-99999999999999999999", "0e-999999999"])
def test_an_exponent_that_cannot_be_written_out_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"question": "q", "answer": {text}}}')
    with pytest.raises(ValueError, match=r"^q.jsonl row 0: answer: has an exponent that is too large for decimal notation; "):
        load_questions([str(path)], images_root="", name="train")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_narrow_floats_in_structs_maps_and_dictionaries(suffix: str, tmp_path: Path) -> None:
    """Equal answers in two columns are one answer, so the second column causes no warning."""
    single = pa.array([0.1, 128.015625], pa.float32())
    columns = {
        "reward_model": pa.StructArray.from_arrays([single], ["ground_truth"]),
        "extra_info": pa.array([[("answer", 0.1)], [("answer", 128.015625)]], pa.map_(pa.string(), pa.float32())),
        "answer": single.dictionary_encode() if suffix == ".arrow" else single,
    }
    for name, column in columns.items():
        table = pa.table({"question": ["q", "q"], name: column})
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        assert [example.payload["answer"] for example in load_questions([str(path)], images_root="", name="train")] == ["0.1", "128.015625"]
    both = tmp_path / "both.parquet"
    pq.write_table(pa.table({"question": ["q", "q"], "reward_model": columns["reward_model"], "answer": single}), both)
    assert not any("answer" in line for line in load_questions([str(both)], images_root="", name="train").warnings[1:])


def test_widened_numbers_that_were_written_as_text_are_named(tmp_path: Path) -> None:
    """Texts and JSON keep the digits of the widened number, so a response of 0.1 would not match.
    The warning names such numbers.
    """
    for name, answer in {"q.jsonl": "0.10000000149011612", "t.jsonl": '"12.34000015258789"'}.items():
        path = tmp_path / name
        path.write_text(f'{{"question": "q", "answer": {answer}}}\n' * 2)
        (line,) = warnings_of(path)
        assert "looks like a float32 number printed with the digits of a float64: " in line
    assert not looks_widened("128.015625") and not looks_widened("0.1") and not looks_widened("nan") and not looks_widened("x")
    assert WrittenNumber("0.10") == 0.1
