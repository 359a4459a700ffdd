"""The rollout codec: rollouts are restored bit for bit, every field is covered, and an untrusted
record raises at worst ValueError."""

import copy
import json
import math
import struct
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pil

from megatron_rl.io.jsonl import to_json_line
from megatron_rl.io.rollout_codec import NOT_RECORDED, VERSION, from_record, to_record
from megatron_rl.types import Image, JudgeResult, Rollout, Status, StopReason, TokenSequence, ToolCall, Turn

FIELDS = {
    Rollout: "task example_id group sample_index source question answer extra sequences turns final_state status stop_reason reason "
    "reward outcome_reward filter_reason reward_terms verdicts wall_s env_s scoring_s",
    TokenSequence: "token_ids loss_mask rollout_logprobs weight_versions images routed_experts old_logprobs reference_logprobs "
    "teacher_logprobs values advantages returns logprob_scale entropies",
    Turn: "sequence token_span text action_start reward step_score reward_delta tool_call images state generation_s env_s",
    ToolCall: "tool source text error ran frame",
    JudgeResult: "judge prompt value turn wall_s reasoning rule_score is_reward",
    Image: "pil patch_PC grid key merge",
}
"""Fields of the records in version 10."""
PICTURE = pil.new("RGB", (28, 28), (1, 2, 3))
NUMBERS = st.floats()
TEXT = st.text(st.characters())
"""Text with lone surrogates, which a policy's bytes may decode to."""


def bits(value: object) -> Any:
    """Return a value that is equal for two objects of the same type and the same bits.

    All NaNs are equal.
    """
    if is_dataclass(value):
        kept = [field.name for field in fields(value) if field.name != "patch_PC"]
        return type(value).__name__, {name: bits(getattr(value, name)) for name in kept}
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(each) for each in value]
    if isinstance(value, dict):
        return [(key, bits(each)) for key, each in value.items()]
    return type(value).__name__, value


def travelled(rollout: Rollout) -> Rollout:
    """Encode the rollout as one line of JSON and decode it."""
    pictures = {}

    def store(image: Image) -> str:
        assert image.key not in pictures, "stored twice"
        pictures[image.key] = image.pil
        return f"name of {image.key}"

    line = to_json_line(to_record(rollout, store))
    assert "\n" not in line and line.isascii()
    return from_record(json.loads(line), lambda name: pictures[name.removeprefix("name of ")])


@st.composite
def contexts(draw: st.DrawFn, images: list[Image]) -> TokenSequence:
    length = draw(st.integers(0, 6))

    def column(values: st.SearchStrategy, *, may_lack: bool = False) -> list:
        return [] if may_lack and draw(st.booleans()) else draw(st.lists(values, min_size=length, max_size=length))

    return TokenSequence(
        token_ids=column(st.integers(0, 200_000)), loss_mask=column(st.integers(0, 1)), rollout_logprobs=column(NUMBERS),
        weight_versions=column(st.integers(-1, 9)), images=draw(st.lists(st.sampled_from(images), max_size=2)),
        routed_experts=draw(st.lists(st.binary(max_size=4), max_size=length)),
        old_logprobs=column(NUMBERS, may_lack=True), reference_logprobs=column(NUMBERS, may_lack=True),
        teacher_logprobs=column(NUMBERS, may_lack=True), values=column(NUMBERS, may_lack=True), advantages=column(NUMBERS, may_lack=True),
        returns=column(NUMBERS, may_lack=True), logprob_scale=column(NUMBERS, may_lack=True),
    )  # fmt: skip


@st.composite
def turns(draw: st.DrawFn, shown: list[TokenSequence], images: list[Image]) -> Turn:
    number = draw(st.integers(0, len(shown) - 1))
    span = tuple(sorted(draw(st.tuples(*[st.integers(0, len(shown[number].token_ids))] * 2))))
    call = st.builds(ToolCall, tool=TEXT, source=TEXT, text=TEXT, error=TEXT, ran=st.booleans())
    return Turn(
        sequence=number, token_span=span, text=draw(TEXT), action_start=draw(st.sampled_from([None, *range(*span)])),
        reward=draw(NUMBERS), step_score=draw(st.none() | NUMBERS), reward_delta=draw(NUMBERS),
        tool_call=draw(st.none() | call), images=draw(st.lists(st.sampled_from(images), max_size=2)), state=draw(TEXT),
        generation_s=draw(NUMBERS), env_s=draw(NUMBERS),
    )  # fmt: skip


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    grids = draw(
        st.lists(
            st.tuples(st.just(1), st.integers(1, 40).map(lambda n: 3 * n), st.integers(1, 40).map(lambda n: 3 * n)), min_size=1, max_size=3
        )
    )
    images = [Image(pil.new("L", (1, number + 1)), None, grid, f"{number}a", merge=3) for number, grid in enumerate(grids)]
    shown = draw(st.lists(contexts(images), max_size=3))
    return Rollout(
        task=draw(TEXT), example_id=draw(TEXT), source=draw(TEXT), group=draw(st.integers(0, 99)), sample_index=draw(st.integers(0, 99)),
        sequences=shown, question=draw(TEXT), answer=draw(TEXT), extra=draw(TEXT),
        turns=draw(st.lists(turns(shown, images), max_size=3)) if shown else [], status=draw(st.sampled_from(Status)),
        stop_reason=draw(st.sampled_from(StopReason)), reason=draw(TEXT), reward=draw(st.none() | NUMBERS), outcome_reward=draw(NUMBERS),
        filter_reason=draw(TEXT), reward_terms=draw(st.dictionaries(TEXT, NUMBERS, max_size=3)),
        wall_s=draw(NUMBERS), env_s=draw(NUMBERS), scoring_s=draw(NUMBERS),
    )  # fmt: skip


@settings(deadline=None)
@given(rollouts())
def test_a_rollout_comes_back_bit_for_bit(rollout: Rollout) -> None:
    """Random rollouts are restored bit for bit, with NaN, infinities, negative zeros, empty
    columns, scores that are None, and any text."""
    assert bits(travelled(rollout)) == bits(rollout)


def full() -> Rollout:
    """Return a rollout in which no field has its default value."""
    image = Image(PICTURE, torch.zeros(4, 1176), (1, 2, 2), "ab12", merge=2)
    context = TokenSequence(
        token_ids=[5, 6, 7], loss_mask=[0, 0, 1], rollout_logprobs=[0.0, 0.0, -0.1], weight_versions=[-1, -1, 4], images=[image],
        routed_experts=[b"\x00\xff", b"ab"],
        old_logprobs=[0.0, 0.0, -0.2], reference_logprobs=[0.0, 0.0, -0.3], teacher_logprobs=[0.0, 0.0, -0.6],
        values=[0.0, 0.0, 0.4], advantages=[0.0, 0.0, -0.0],
        returns=[0.0, 0.0, 0.7], logprob_scale=[0.0, 0.0, 0.5], entropies=[0.0, 0.0, 1.5],
    )  # fmt: skip
    call = ToolCall(tool="python", source="1 / 0", text="it was told", error="ZeroDivisionError", ran=False, frame=(80, 60))
    turn = Turn(
        sequence=0, token_span=(2, 3), text="\u4e2d\ud800\n", action_start=2, reward=0.5, step_score=0.25, reward_delta=0.125,
        tool_call=call, images=[image], state="2 5", generation_s=1.5, env_s=0.75,
    )  # fmt: skip
    return Rollout(
        task="mine", example_id="e-1", group=3, sample_index=4, source="vstar", sequences=[context], turns=[turn],
        final_state=replace(context, token_ids=[5, 6, 8]),
        question="<image>\nHow many?", answer="4", extra='{"index": 7}',
        status=Status.TRUNCATED, stop_reason=StopReason.MAX_TURNS,
        reason="why", reward=math.nan, outcome_reward=-math.inf, filter_reason="zero_std", reward_terms={"a": 1 / 3, "": -0.0},
        verdicts=[JudgeResult(judge="j", prompt="p 1", value=0.25, turn=0, wall_s=0.5, reasoning="Hm.", rule_score=0.5, is_reward=False)],
        wall_s=3.0, env_s=2.0, scoring_s=1.0,
    )  # fmt: skip


def test_every_field_is_carried() -> None:
    """Every field of every record is restored. A new field needs a value in `full`."""
    rollout = full()
    back = travelled(rollout)
    for kind, (sent, came) in {
        Rollout: (rollout, back),
        TokenSequence: (rollout.sequences[0], back.sequences[0]),
        Turn: (rollout.turns[0], back.turns[0]),
        ToolCall: (rollout.turns[0].tool_call, back.turns[0].tool_call),
        JudgeResult: (rollout.verdicts[0], back.verdicts[0]),
        Image: (rollout.sequences[0].images[0], back.sequences[0].images[0]),
    }.items():
        for field in (each for each in fields(kind) if each.name not in NOT_RECORDED):
            value = getattr(sent, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            assert value is not None and repr(value) != repr(default), f"give {kind.__name__}.{field.name} a value in full()"
            assert field.name == "patch_PC" or bits(getattr(came, field.name)) == bits(value), f"{kind.__name__}.{field.name} is lost"
    assert back.sequences[0].images[0].patch_PC is None
    assert back.sequences[0].images[0] is back.turns[0].images[0], "one picture in memory, however often it is shown"


def test_other_fields_are_another_version() -> None:
    """The fields of all records equal those pinned for VERSION. A change requires a new VERSION."""
    now = {kind: " ".join(field.name for field in fields(kind) if field.name not in NOT_RECORDED) for kind in FIELDS}
    assert (VERSION, now) == (10, FIELDS), "records of before can no longer be read: raise rollout_codec.VERSION, and pin the fields here"


def test_a_reader_may_do_without_pictures() -> None:
    """Records are decoded without loading images; grid, key and token count are kept."""
    (image,) = from_record(to_record(full(), lambda image: image.key), lambda name: None).sequences[0].images
    assert (image.pil, image.grid, image.key, image.num_tokens) == (None, (1, 2, 2), "ab12", 1)


def test_numbers_of_others_become_ours() -> None:
    """numpy numbers from a user's environment become Python numbers after encoding and decoding."""
    rollout = full()
    rollout.reward, rollout.group, rollout.turns[0].reward_delta, rollout.reward_terms = np.float32(0.1), np.int64(7), True, {"a": 3}
    back = travelled(rollout)
    assert bits([back.reward, back.group, back.turns[0].reward_delta, back.reward_terms]) == bits(
        [float(np.float32(0.1)), 7, 1.0, {"a": 3.0}]
    )


DAMAGED: dict[str, tuple[tuple, object]] = {
    "turns\\[0\\].action_start: 3: not within the span \\(2, 3\\)": (("turns", 0, "action_start"), 3),
    "version: 1: this program reads 10": (("version",), 1),
    "version: None: this program reads 10": (("version",), None),
    "rollout: \\['new'\\]: no such field": (("new",), 1),
    "rollout.reward: 'nan': not a number": (("reward",), "nan"),
    "rollout.reward: True: not a number": (("reward",), True),
    "rollout.group: 1.0: not a 64-bit integer": (("group",), 1.0),
    "rollout.group: 9223372036854775808: not a 64-bit integer": (("group",), 1 << 63),
    "rollout.status: 'Failed': not one of completed, truncated, failed": (("status",), "Failed"),
    "rollout.reward_terms\\['a'\\]: None: not a number": (("reward_terms", "a"), None),
    "rollout.sequences: {}: not a list": (("sequences",), {}),
    "rollout.sequences\\[0\\]: \\[\\]: not an object": (("sequences", 0), []),
    "rollout.sequences\\[0\\].images\\[0\\]: 'x': not one of the record's images": (("sequences", 0, "images", 0), "x"),
    "sequences\\[0\\].weight_versions: 2: not equal to the 3 tokens": (("sequences", 0, "weight_versions"), [1, 2]),
    "sequences\\[0\\].values: 1: not equal to the 3 tokens": (("sequences", 0, "values"), [1.0]),
    "sequences\\[0\\].routed_experts: 4: not equal to the 3 tokens": (("sequences", 0, "routed_experts"), ["", "", "", ""]),
    "rollout.sequences\\[0\\].routed_experts: 'AA': not base64": (("sequences", 0, "routed_experts"), ["AA"]),
    "sequences\\[0\\].rollout_logprobs: 0: not equal to": (("sequences", 0, "rollout_logprobs"), []),
    "sequences\\[0\\].token_ids: \\[5, -6, 7\\]: contains negative token ids": (("sequences", 0, "token_ids", 1), -6),
    "sequences\\[0\\].loss_mask: \\[0, 2, 1\\]: contains values other than 0 and 1": (("sequences", 0, "loss_mask", 1), 2),
    "turns\\[0\\].sequence: 1: not an index of 1 sequences": (("turns", 0, "sequence"), 1),
    "turns\\[0\\].token_span: \\(2, 4\\): not within the 3 tokens of its sequence": (("turns", 0, "token_span"), [2, 4]),
    "rollout.turns\\[0\\].token_span: \\[2\\]: not 2 values": (("turns", 0, "token_span"), [2]),
    "rollout.turns\\[0\\].tool_call.ran: 1: not a boolean": (("turns", 0, "tool_call", "ran"), 1),
    "rollout.turns\\[0\\].text: None: not a string": (("turns", 0, "text"), None),
    "images: None: not an object with string keys": (("images",), None),
    "images\\['ab12'\\]: \\[1, 0, 2\\]: not a grid of patches": (("images", "ab12", "grid"), [1, 0, 2]),
    "images\\['ab12'\\]: \\[1, 5000, 5000\\]: not a grid of patches": (("images", "ab12", "grid"), [1, 5000, 5000]),
    "images\\['ab12'\\]: 'x': not an object with name, grid and merge": (("images", "ab12"), "x"),
    "images\\['ab12'\\]: 0: does not divide the grid": (("images", "ab12", "merge"), 0),
    "images\\['ab12'\\]: 3: does not divide the grid": (("images", "ab12", "merge"), 3),
}  # fmt: skip


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_record_is_told_in_a_line(said: str) -> None:
    """A damaged record is rejected in one line that names the field and the value."""
    *path, last = DAMAGED[said][0]
    record = place = to_record(full(), lambda image: image.key)
    for name in path:
        place = place[name]
    place[last] = DAMAGED[said][1]
    with pytest.raises(ValueError, match=f"^rollout record: {said}") as refused:
        from_record(record, lambda name: None)
    assert "\n" not in str(refused.value)


def test_a_field_that_lacks_is_named() -> None:
    """A record with a missing field is rejected by the name of the field."""
    record = to_record(full(), lambda image: image.key)
    del record["turns"][0]["reward_delta"]
    with pytest.raises(ValueError, match=r"^rollout record: rollout.turns\[0\]: \['reward_delta'\]: lacking$"):
        from_record(record, lambda name: None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def refused_or_read(record: object) -> None:
    """Assert that a record is rejected in one line or read.

    A record that was read is unchanged by another round trip.
    """
    try:
        rollout = from_record(record, lambda name: PICTURE)
    except ValueError as refused:
        said = str(refused)
        assert said.startswith("rollout record: ") and "\n" not in said and len(said) < 500
    else:
        line = to_json_line(to_record(rollout, lambda image: image.key))
        again = from_record(json.loads(line), lambda name: PICTURE)
        assert bits(again) == bits(rollout)
        assert to_json_line(to_record(again, lambda image: image.key)) == line


@settings(deadline=None)
@given(JSON | st.fixed_dictionaries({"version": st.just(VERSION), "images": JSON}))
def test_anything_is_read_or_refused(record: object) -> None:
    """Any JSON value is read or rejected in one line."""
    refused_or_read(record)


@settings(deadline=None)
@given(st.data())
def test_a_record_with_any_part_changed_is_read_or_refused(data: st.DataObject) -> None:
    """A record with any part replaced, removed, added or duplicated is read or rejected in one
    line."""
    record = json.loads(to_json_line(to_record(full(), lambda image: image.key)))
    place, steps = record, data.draw(st.integers(1, 5))
    while True:
        names = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        name, steps = data.draw(st.sampled_from(names)), steps - 1
        if not steps or not isinstance(place[name], dict | list) or not place[name]:
            break
        place = place[name]
    how = data.draw(st.sampled_from(["replace", "remove", "add", "twice"]))
    match how:
        case "replace":
            place[name] = data.draw(JSON)
        case "remove":
            del place[name]
        case "add" if isinstance(place, dict):
            place[data.draw(st.text())] = data.draw(JSON)
        case _ if isinstance(place, list):
            place.append(copy.deepcopy(place[name]))
    refused_or_read(record)
