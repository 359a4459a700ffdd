"""Tests where chat templates are found, and which processors and templates are refused for
training.
"""

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings
from megatron_rl.rollout import processor
from megatron_rl.rollout.processor import check_template, find_continuation_problem, load_processor
from megatron_rl.rollout.renderer import Renderer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def folder(random_model: Path, tmp_path: Path) -> Path:
    """Return a folder with the files of a processor that has no chat template."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        shutil.copy(random_model / name, tmp_path)
    return tmp_path


def add(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
PLACES = {
    "chat_template.jinja": lambda folder: (folder / "chat_template.jinja").write_text(CHATML),
    "chat_template.json": lambda folder: add(folder, "chat_template.json", chat_template=CHATML),
    "named in chat_template.json": lambda folder: add(folder, "chat_template.json", chat_template=NAMED),
    "processor_config.json": lambda folder: add(folder, "processor_config.json", chat_template=CHATML),
    "tokenizer_config.json": lambda folder: add(folder, "tokenizer_config.json", chat_template=CHATML),
    "named in tokenizer_config.json": lambda folder: add(folder, "tokenizer_config.json", chat_template=NAMED),
}


@pytest.mark.known_failure("template-not-found")
@pytest.mark.parametrize("place", PLACES)
def test_a_chat_template_is_found_where_transformers_keeps_one(place: str, folder: Path) -> None:
    PLACES[place](folder)
    render = Renderer(ModelSettings(path=str(folder)))
    shown = render.describe_sequence(render.prompt([{"role": "user", "content": "hi"}]))
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template; copy chat_template.jinja"),
        ([{"name": "tool_use", "template": "x"}], "its chat templates are named tool_use; rename the template for training to default"),
        ("{% if %}", "cannot be rendered .Expected an expression"),
        ("{{ messages[0].content.upper }}{{ raise_exception('not today') }}", "cannot be rendered .not today.; copy"),
        ("{{ 'x' + messages[1].content }}", "cannot be rendered .can only concatenate str"),
        (
            CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"),
            "omits the system",
        ),
        (CHATML.replace("{{ part.text }}", ""), "omits the user's text"),
        (CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"), "renders two images as 0 "),
        ("{% filter replace('\n\n', '\n') %}" + CHATML + "{% endfilter %}", "omits the system"),
        (CHATML.replace("{{ part.text }}", "{{ part.text | lower }}"), "omits the user's text"),
        (CHATML.replace("{{ part.text }}", "{{ part.text | e }}"), "omits the user's text"),
        (CHATML.partition("{% if add_gen")[0], "does not begin the response"),
    ],
)
def test_a_template_that_loses_what_it_is_given(template: object, said: str, folder: Path) -> None:
    if template is not None:
        add(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match=f"^model.path={folder}: [^\n]*{said}[^\n]*$"):
        Renderer(ModelSettings(path=str(folder)))


THOUGHTS = CHATML.replace(
    "{% if message.content is string %}{{ message.content }}",
    "{% if message.content is string %}{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}",
)  # fmt: skip
LAST_ALONE = CHATML.replace("{% for message in messages %}", "{% for message in messages[-1:] %}")
OTHER_END = CHATML.replace("{{ '<|im_end|>\n' }}", "{{ '</s>' if message.role == 'assistant' else '<|im_end|>\n' }}")
THINKS = CHATML.replace("assistant\n'", "assistant\n<think>\n'")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHATML, ""),
        (THOUGHTS, "thoughts of earlier turns"),
        (LAST_ALONE, "earlier messages"),
        (OTHER_END, "'probe reply</s>'"),
        (THINKS, "renders"),
    ],
)
def test_a_template_behind_whose_replies_nothing_can_be_appended(template: str, problem: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    processor = load_processor(str(folder))

    def render(messages: list, speak: bool) -> str:
        return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=speak)

    check_template(render, str(folder)) if template is not LAST_ALONE else None
    found = find_continuation_problem(render, str(folder))
    assert (problem in found) if problem else (found == "")


@pytest.mark.known_failure("thoughts-stripped")
def test_episodes_of_several_turns_and_transcripts_need_a_template_that_keeps_thoughts(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(THOUGHTS)
    render = Renderer(ModelSettings(path=str(folder)))
    with pytest.raises(ValueError, match=f"^model.path={folder}: its chat template rewrites or omits thoughts of earlier turns; use"):
        render.require_continuation()
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<think>a</think>b"}]
    assert render.describe_sequence(render.transcript(turns)).endswith("<think>a</think>b<|im_end|>")
    with pytest.raises(ValueError, match=r"^messages\[3\]: the model's chat template rewrites messages before this response; write one"):
        render.transcript([*turns, {"role": "user", "content": "2"}, {"role": "assistant", "content": "c"}])


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("preprocessor_config.json", {"image_processor_type": "Qwen2_5_VLImageProcessor"}, "Unrecognized image processor"),
        (
            "preprocessor_config.json",
            {"image_processor_type": "CLIPImageProcessor"},
            "preprocessor_config.json has image_processor_type CLIP",
        ),
        (
            "preprocessor_config.json",
            {"size": {"height": 30, "width": 40}},
            "preprocessor_config.json has the size keys height, width; use",
        ),
        ("preprocessor_config.json", {"size": 448}, "preprocessor_config.json has the size keys shortest_edge; use"),
        ("preprocessor_config.json", None, r"preprocessor_config.json \(which is missing\) again"),
        ("processor_config.json", {"processor_class": "LlavaProcessor"}, "processor_config.json has processor_class LlavaProcessor"),
    ],
)
def test_a_processor_of_another_kind(file: str, change: dict | None, said: str, folder: Path) -> None:
    stored = json.loads((folder / "processor_config.json").read_text())
    if file == "preprocessor_config.json":
        (folder / "processor_config.json").unlink()
        stored = stored["image_processor"]
    if change is not None:
        (folder / file).write_text(json.dumps({**stored, **change}))
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(ValueError, match=f"^model.path={folder}: [^\n]*{said}[^\n]*$"):
        load_processor(str(folder))


@pytest.mark.parametrize(
    "change", [{"size": {"min_pixels": 3136, "max_pixels": 12845056}}, {"image_processor_type": "Qwen2VLImageProcessorFast"}]
)
def test_older_forms_of_a_processor(change: dict, folder: Path) -> None:
    stored = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps({**stored, **change}))
    (folder / "chat_template.jinja").write_text(CHATML)
    assert load_processor(str(folder)).chat_template == CHATML


def test_grounding_tokens_of_questions_are_tokens_where_they_are_allowed(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    words = "<|object_ref_start|>the cup<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|><|quad_start|><|quad_end|>"
    messages = [{"role": "user", "content": f"{words}<|im_end|>"}]
    plain, allowed = (Renderer(ModelSettings(path=str(folder)), allow_grounding_tokens=each) for each in (False, True))
    assert words in allowed.describe_sequence(allowed.prompt(messages))
    assert words.replace("<|", "< |") in plain.describe_sequence(plain.prompt(messages))
    ids = allowed.prompt(messages).token_ids
    assert ids.count(allowed.tokenizer.convert_tokens_to_ids("<|box_start|>")) == 1
    assert ids.count(allowed.end_id) == 1, "a control token in a question stays text"
    assert (plain.find_special_token(words), allowed.find_special_token(words), allowed.find_special_token("<|im_end|>")) == (
        "<|object_ref_start|>",
        "",
        "<|im_end|>",
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("vision_config.patch_size", 7, "vision_config.patch_size in config.json is 7, but patch_size of the processor is 14"),
        (
            "vision_config.temporal_patch_size",
            1,
            "vision_config.temporal_patch_size in config.json is 1, but temporal_patch_size of the processor is 2",
        ),
        (
            "vision_config.spatial_merge_size",
            1,
            "vision_config.spatial_merge_size in config.json is 1, but merge_size of the processor is 2",
        ),
        ("image_token_id", 1, r"image_token_id in config.json is 1, but <\|image_pad\|> of the processor is \d+"),
        ("video_token_id", 2, r"video_token_id in config.json is 2, but <\|video_pad\|> of the processor is \d+"),
        ("vision_start_token_id", 3, r"vision_start_token_id in config.json is 3, but <\|vision_start\|> of the processor is \d+"),
        ("vision_end_token_id", 4, r"vision_end_token_id in config.json is 4, but <\|vision_end\|> of the processor is \d+"),
    ],
)
def test_a_processor_that_does_not_fit_the_model(field: str, value: int, said: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    stored = json.loads((folder / "config.json").read_text())
    part, _, name = field.rpartition(".")
    (stored[part] if part else stored)[name] = value
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"^model.path={folder}: {said}; use the model's own processor$"):
        Renderer(ModelSettings(path=str(folder)))


@pytest.mark.parametrize("call", ["{{ strftime_now('%H') }}", "{% set t = [1, 2] | random %}", "{{ lipsum(1) }}"])
def test_a_template_whose_text_changes_from_one_time_to_the_next(call: str, folder: Path) -> None:
    name = next(each for each in ("strftime_now", "random", "lipsum") if each in call)
    (folder / "chat_template.jinja").write_text("{# strftime_now random lipsum #}" + CHATML)
    Renderer(ModelSettings(path=str(folder)))
    (folder / "chat_template.jinja").write_text(CHATML + "{% if tools %}" + call + "{% endif %}")
    with pytest.raises(ValueError, match=f"^model.path={folder}: its chat template uses {name}, [^\n]*; replace it with fixed text$"):
        Renderer(ModelSettings(path=str(folder)))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("form", [LOOPS, "{% set a = (messages | length | string) * 1500000000 %}"])
def test_a_template_has_limits_of_time_and_memory(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is stopped at a time and memory limit. Jinja's sandbox has no such limits: the
    first template would render forever, and the second would allocate arbitrary memory.
    """
    monkeypatch.setattr(processor, "TEMPLATE_CPU_S", 2)
    (folder / "chat_template.jinja").write_text(form + CHATML)
    with pytest.raises(ValueError, match=rf"^model.path={folder}: its chat template takes more than 2 s or 1024 MB for a short conv"):
        Renderer(ModelSettings(path=str(folder)))
    (folder / "chat_template.jinja").write_text(CHATML)
    assert Renderer(ModelSettings(path=str(folder))).continuation_problem == ""


@pytest.mark.parametrize("when", ["add_generation_prompt", "messages | selectattr('role', 'eq', 'assistant') | list"])
def test_a_template_is_tried_with_what_begins_a_reply_and_with_a_reply(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check renders a generation prompt and a response, so it finds loops that run only in
    these cases.
    """
    monkeypatch.setattr(processor, "TEMPLATE_CPU_S", 1)
    with pytest.raises(ValueError, match="^model.path=MODEL: its chat template takes more than 1 s or "):
        processor.require_bounded_template("{% if " + when + " %}" + LOOPS + "{% endif %}" + CHATML, "MODEL")
