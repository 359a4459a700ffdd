"""Tests that transcript content that the trainer does not read is refused with file, row, field and
remedy. Oracle: rows written by hand.
"""

from pathlib import Path

import pytest

from tests.support.data_files import make_png
from tests.support.transcripts import REPLY, SHAREGPT_MESSAGES, USER, assistant_row, load_conversation, reply_pair_row, user_row

CHAT, IMAGE = [USER, REPLY], {"type": "image"}
LEARNED = r"must be 0, 1, true or false, not"
VIDEO, MEDIA = r"is not read; .*videos and audio are not supported", r"is not read; images belong in the column images"
REFUSED = {
    # loss flags
    "a weight between": (reply_pair_row(weight=0.5), rf"messages\[1\].weight: {LEARNED} 0.5"),
    "a weight above": (reply_pair_row(weight=2), rf"messages\[1\].weight: {LEARNED} 2"),
    "loss as a word": (reply_pair_row(loss="false"), rf"messages\[1\].loss: {LEARNED} 'false'"),
    "a mask of tokens": (reply_pair_row(loss_mask=[0, 1]), rf"messages\[1\].loss_mask: {LEARNED} \[0, 1\]"),
    "no number": (reply_pair_row(loss_scale=float("nan")), rf"messages\[1\].loss_scale: {LEARNED} nan"),
    "flags at odds": (reply_pair_row(loss=True, weight=0), r"messages\[1\]: has loss and weight, which contradict each other; keep one"),
    "a learned user": (
        {"messages": [USER | {"loss": True}, REPLY]},
        r"messages\[0\].loss: is set in a message with the role user, but only assistant messages",
    ),
    "mask": (reply_pair_row(mask=1), r"messages\[1\].mask: may mean .* write loss: true or loss: false"),
    "all masked": ({"messages": [USER, REPLY | {"loss": 0}]}, "messages: every response in this row is masked"),
    "a masked row": ({"weight": 0, "messages": CHAT}, "weight: cannot be set for a whole row; set loss"),
    "a weighted row": ({"weight": 0.3, "messages": CHAT}, "weight: cannot be set for a whole row"),
    "a mask of messages": ({"loss_mask": [0, 1], "messages": CHAT}, "loss_mask: cannot be set for a whole row"),
    "weights of messages": ({"weights": [0, 1], "messages": CHAT}, "weights: cannot be set for a whole row"),
    "inputs that are learned": ({"train_on_inputs": True, "messages": CHAT}, "train_on_inputs: cannot be set for a whole row"),
    "a mask of NeMo": ({"mask": "User", "messages": CHAT}, "mask: cannot be set for a whole row"),
    # keys of messages
    "reasoning_content": (
        assistant_row("x", reasoning_content="y"),
        r"messages\[1\].reasoning_content: is not read; write the reasoning into",
    ),
    "thinking": (assistant_row("x", thinking="y"), r"messages\[1\].thinking: is not read; write the reasoning into the content"),
    "a name": ({"messages": [USER | {"name": "Ann"}, REPLY]}, r"messages\[0\].name: is not read, and the chat template writes no names"),
    "a prefix": (assistant_row("x", prefix=True), r"messages\[1\].prefix: is not read; write the whole response into"),
    "images of a message": (
        {"messages": [USER | {"images": ["red.png"]}, REPLY]},
        r"messages\[0\].images: is not read; name the images in the row",
    ),
    "a video of a message": (
        {"messages": [USER | {"videos": ["a.mp4"]}, REPLY]},
        r"messages\[0\].videos: is not read: transcripts contain only text and images; remove",
    ),
    "a stranger's key": (
        assistant_row("x", mood="good"),
        r"messages\[1\].mood: is unknown; a message has role and content .* mask a response",
    ),
    "a flag of unknown meaning": (assistant_row("x", learn=False), r"messages\[1\].learn: is unknown; a message"),
    "a number of unknown meaning": (assistant_row("x", level=0), r"messages\[1\].level: is unknown; a message"),
    "a flag of a turn": (assistant_row("x", turn=False), r"messages\[1\].turn: is unknown; a message has role and content"),
    "a mapping of times": (assistant_row("x", time={"loss": 0}), r"messages\[1\].time: is unknown; a message"),
    "a flag of an unknown name": (assistant_row("x", turn_loss=0), r"messages\[1\].turn_loss: is unknown; a message"),
    "a flag of a part": (
        assistant_row([{"type": "text", "text": "x", "loss": False}]),
        r"messages\[1\].content\[0\].loss: is not read; remove this key",
    ),
    "a channel": (assistant_row("x", channel="analysis"), r"messages\[1\].channel: is unknown; a message"),
    "two pairs of keys": (
        {"messages": [USER | SHAREGPT_MESSAGES[0], REPLY]},
        r"messages\[0\]: mixes the keys role and content with the keys from and value",
    ),
    "turns of pairs": ({"conversation": [{"human": "a", "assistant": "b"}]}, r"conversation\[0\].human: is unknown; a message has"),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\].content: is missing"),
    "a number": (user_row(7), r"messages\[0\]: its content must be text or a list of parts, not int"),
    "a call as a role": (
        {"conversations": [SHAREGPT_MESSAGES[0], {"from": "function_call", "value": "{}"}]},
        r"conversations\[1\].from: role 'function_call' is",
    ),
    "silence of the user": (user_row(" "), r"messages\[0\]: the user message has neither text nor"),
    # columns
    "rejected_response": ({"rejected_response": "x", "messages": CHAT}, "rejected_response: is preference data, but a warm start"),
    "chosen and rejected": ({"chosen": CHAT, "rejected": CHAT}, "chosen: is preference data, but a warm start"),
    "chosen beside conversations": (
        {"conversations": SHAREGPT_MESSAGES, "chosen": SHAREGPT_MESSAGES[1], "rejected": SHAREGPT_MESSAGES[1]},
        "chosen: is preference data, but a warm start",
    ),
    "kto_tag": ({"kto_tag": True, "messages": CHAT}, "kto_tag: marks a response as good or bad; keep"),
    "label of KTO": ({"label": False, "messages": CHAT}, "label: marks a response as good or bad; keep only rows"),
    "functions": ({"functions": [{"name": "crop"}], "messages": CHAT}, "functions: are not read"),
    "a template's arguments": ({"chat_template_kwargs": {"enable_thinking": False}, "messages": CHAT}, "chat_template_kwargs: is not read"),
    "a switch of a template": ({"enable_thinking": True, "messages": CHAT}, "enable_thinking: is not read; write what the policy"),
    "documents": ({"documents": [{"text": "x"}], "messages": CHAT}, "documents: is not read; write what the policy should read into"),
    "labels of tokens": ({"input_ids": [1], "labels": [-100], "messages": CHAT}, "input_ids: is not read: the messages are tokenized"),
    "no list": ({"messages": "User: hi"}, "messages: must be a list of messages .*, not str"),
    "a list as text, cut off": ({"messages": '[{"role": "user", "content"'}, "messages: looks like messages but is not valid"),
    "lists in a mapping": ({"messages": {"role": ["user"], "content": ["x"]}}, "messages: must be a list of messages .*, not dict"),
    "a reply that is not to be seen": (assistant_row("\u200b\u00a0"), r"messages\[1\]: the assistant message is empty and would"),
    "a history of messages": ({"history": [["a", "b"]], "messages": CHAT}, "history: is read only together with instruction or query"),
    "a history of one": ({"history": [["a"]], "query": "a", "response": "b"}, r"history\[0\]: must be a pair .* has 1 items"),
    "two answers": ({"instruction": "a", "output": ["b", "c"]}, "output: must be text, not list"),
    "two forms": ({"messages": CHAT, "instruction": "a", "output": "b"}, "messages and output: each contain a conversation; keep one"),
    "two systems": (
        {"system": "a", "system_prompt": "b", "messages": CHAT},
        "system_prompt: the system message is also given elsewhere",
    ),
    "plain text of TRL": (
        {"prompt": "a", "completion": "b"},
        "prompt: must be a list of messages, not str: TRL does not apply the chat template to",
    ),
    "question and answer": ({"question": "a", "answer": "b"}, "messages: is missing; .*; this row has question, answer"),
    "objects of ms-swift": (user_row("x", objects={"bbox": [[1, 2, 3, 4]]}), "objects: is not read, nor are <bbox> and <ref-object>"),
    # media in columns
    "videos": (user_row("x", videos=["a.mp4"]), rf"videos: .+ and {VIDEO}"),
    "a video of Qwen's script": ({"video": "a.mp4", "conversations": SHAREGPT_MESSAGES}, rf"video: .+ and {VIDEO}"),
    "audios": (user_row("x", audios=["a.wav"]), rf"audios: .+ and {VIDEO}"),
    "a video by its number": (user_row("x", video="clip_17"), rf"video: .+ and {VIDEO}"),
    "a path": (user_row("x", scene="red.png"), rf"scene: .+ and {MEDIA}"),
    "an address": (user_row("x", shown="https://a.b/c.jpg?size=1"), rf"shown: .+ and {MEDIA}"),
    "bytes of datasets": (user_row("x", page={"bytes": "aGFsbG8=", "path": None}), rf"page: .+ and {MEDIA}"),
    "base64": (user_row("x", page=make_png(size=(99, 99))), rf"page: .+ and {MEDIA}"),
    "a picture deep in a mapping": (user_row("x", extra={"a": {"b": {"c": [{"d": {"e": "blue.png"}}]}}}), rf"extra: .+ and {MEDIA}"),
    "a picture in a mapping": (user_row("x", extra={"shots": [{"a": "blue.png"}]}), rf"extra: .+ and {MEDIA}"),
    "a picture that is there": (user_row("x", image_id="red.png"), rf"image_id: .+ and {MEDIA}"),
    "audio of datasets": (user_row("x", heard={"array": [0.1], "sampling_rate": 16000}), rf"heard: .+ and {VIDEO}"),
    "image_url": (user_row("x", image_url="https://a.b/c"), r"image_url: .* is a URL, which is not supported; download the image"),
    "image_0": (user_row("x", image_0="red.png"), rf"image_0: .+ and {MEDIA}"),
    "two columns of pictures": (user_row("x", image="red.png", images=["blue.png"]), "image and images: each name images; keep one"),
    # places
    "<video>": (user_row("<video>Why?"), r"messages\[0\]: contains <video>, which is a media"),
    "<audio>": (user_row("Hear <audio>!"), r"messages\[0\]: contains <audio>, which is a media"),
    "<img> of Qwen-VL": (user_row("Picture 1: <img>red.png</img>"), r"messages\[0\]: contains <img>, which is a media"),
    "numbered places": (
        user_row("See <image 1>."),
        r"messages\[0\]: contains <image 1>, which is a media placeholder: write <image>",
    ),
    "a place of Phi": (user_row("<|image_1|>"), r"messages\[0\]: contains <\|image_1\|>, which is"),
    "a place of InternLM": (user_row("<ImageHere>"), r"messages\[0\]: contains <ImageHere>, which is"),
    "a place of LLaVA": (user_row("<im_start><image><im_end>", image="red.png"), r"messages\[0\]: contains <im_start>, which is"),
    "a place of Mistral": (user_row("[IMG]"), r"messages\[0\]: contains \[IMG\], which is"),
    "a place of InternVL": (user_row("<IMG_CONTEXT>"), r"messages\[0\]: contains <IMG_CONTEXT>, which is"),
    "a place of GLM": (user_row("<|begin_of_image|>"), r"messages\[0\]: contains <\|begin_of_image\|>, which is"),
    "a place of Kimi": (user_row("<|media_pad|>"), r"messages\[0\]: contains <\|media_pad\|>, which is"),
    "a place of MiniCPM": (user_row("(<image>./</image>)", image="red.png"), r"messages\[0\]: contains ./</image>, which is"),
    "a place of Idefics": (user_row("<fake_token_around_image>"), r"messages\[0\]: contains <fake_token_around_image>, which is"),
    "places in the plural": (user_row("<images>"), r"messages\[0\]: contains <images>, which is"),
    "a place in brackets": (user_row("[IMAGE]"), r"messages\[0\]: contains \[IMAGE\], which is"),
    "a token of Qwen": (user_row("<|image_pad|>"), r"messages\[0\]: contains <\|image_pad\|>; write <image> for an image"),
    "a token of Qwen in a reply": (assistant_row("<|vision_pad|>"), r"messages\[1\]: contains <\|vision_pad\|>"),
    "<bbox>": (
        assistant_row("<bbox>"),
        r"messages\[1\]: contains <bbox>, a placeholder that this trainer does not fill; write out the text instead",
    ),
    "<ref-object>": (user_row("find <ref-object>"), r"messages\[0\]: contains <ref-object>, a placeholder"),
    "<image> in a reply": (
        {"images": ["red.png", "blue.png"], "messages": [{"role": "user", "content": "<image>"}, REPLY | {"content": "![x](<image>)"}]},
        r"messages\[1\] \(<image>\): contains an image in a message with the role assistant: only user and tool messages may contain",
    ),
    "<image> in the system": (
        user_row("x", system="<image>", image="red.png"),
        r"system \(<image>\): contains an image in a message with the role sys",
    ),
    "a place in the system's parts": (
        {"images": ["red.png"], "messages": [{"role": "system", "content": [IMAGE]}, USER, REPLY]},
        r"messages\[0\].content\[0\]: contains an image in a message with the role system",
    ),
    "too few pictures": (
        user_row([IMAGE, IMAGE], image="red.png"),
        r"messages\[0\]: has an image placeholder .* the column image has no images left",
    ),
    "a place and no column": (user_row([IMAGE]), r"messages\[0\]: has an image placeholder .* the row has no image column"),
    "pictures in parts and in a column": (
        user_row([IMAGE | {"image": "red.png"}], images=["blue.png"]),
        "images: 1 images for 0 placeholders",
    ),
    # message parts
    "a part of video": (
        user_row([{"type": "video", "video": "a.mp4"}]),
        r"messages\[0\].content\[0\]: a part of type video is not read: transcripts contain only text and images; remove",
    ),
    "a part of audio": (
        user_row([{"type": "input_audio", "input_audio": {}}]),
        r"messages\[0\].content\[0\]: a part of type input_audio is not read",
    ),
    "a file": (user_row([{"type": "file", "file": {}}]), r"messages\[0\].content\[0\]: a part of type file is not read"),
    "input_text": (
        user_row([{"type": "input_text", "text": "x"}]),
        r"messages\[0\].content\[0\]: a part of type input_text .* write type text",
    ),
    "input_image": (user_row([{"type": "input_image"}]), r"messages\[0\].content\[0\]: a part of type input_image .* write type image or"),
    "a refusal": (
        assistant_row([{"type": "refusal", "refusal": "no"}]),
        r"messages\[1\].content\[0\]: a part of type refusal is not read; move its text into a part",
    ),
    "a thought": (
        assistant_row([{"type": "thinking", "thinking": "x"}]),
        r"messages\[1\].content\[0\]: a part of type thinking is not read",
    ),
    "text without text": (user_row([{"type": "text"}]), r"messages\[0\].content\[0\].text: is missing"),
    "a string among parts": (user_row(["x"]), r"messages\[0\].content\[0\]: is plain text in a list of parts; write"),
    "no type": (user_row([{"text": "x"}]), r"messages\[0\].content\[0\]: a part must be of type .* not None"),
    "parts as text": (user_row('[{"type": "text", "text": "x"}]'), r"messages\[0\]: the content is text that contains a list of parts"),
    "pixels of a picture": (
        user_row([IMAGE | {"image": "red.png", "max_pixels": 9}]),
        r"messages\[0\].content\[0\].max_pixels: model.min_pixels and",
    ),
    "a box beside a part's picture": (
        user_row([IMAGE | {"image": {"path": "red.png", "bbox": [0, 0, 9, 9]}}]),
        r"messages\[0\].content\[0\].image.bbox: is not read; remove this key",
    ),
    "a picture twice": (
        user_row([IMAGE | {"image": "red.png", "path": "red.png"}]),
        r"messages\[0\].content\[0\]: has image and path; keep one",
    ),
    "little detail": (
        user_row([{"type": "image_url", "image_url": {"url": "red.png", "detail": "low"}}]),
        r"messages\[0\].content\[0\].image_url.detail",
    ),
    "an address in a part": (user_row([{"type": "image", "url": "https://a.b/c.png"}]), r"messages\[0\].content\[0\].url: \S+ is a URL"),
}


@pytest.mark.known_failure("thoughts-stripped")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    row, told = REFUSED[name]
    with pytest.raises(ValueError, match=f"^t.jsonl row 0: {told}") as refused:
        load_conversation(tmp_path, row)
    assert "\n" not in str(refused.value)
