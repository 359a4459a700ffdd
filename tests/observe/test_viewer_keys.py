"""User interaction with the viewer: keys, an active run, tokens decoded by a tokenizer, colors,
light and dark scheme, wide and narrow windows.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.recorder import image_file_name, save_images
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.observe.viewer.store import label_folders
from megatron_rl.observe.viewer.web_app import create_app
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.types import TokenSequence, Turn
from tests.observe.test_recorder import picture
from tests.observe.test_viewer import ATTACKS, CHROMIUM, rollout
from tests.support.browser import BrowserPage, open_browser

COLORS = ("rollout_logprobs", "engine gap", "advantages", "loss_mask", "weight_versions", "entropies")


def grow(folder: Path, step: int) -> None:
    """Write one more step with two groups; the second has the attack texts."""
    rollouts = [rollout(sample, sample / 4, step=step) for sample in range(3)]
    rollouts += [rollout(number, 1.0, step=step, group=1, said=attack) for number, attack in enumerate(ATTACKS)]
    save_images(folder / "rollouts", rollouts)
    write_step(step_path(folder / "rollouts", step), rollouts, step=step, num_gen_batches=1)
    write_lines_atomically(folder / "metrics.jsonl", [{"step": each, "reward/mean": each / 2, "loss": 0.5} for each in range(step + 1)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        for step in range(2):
            grow(home / name, step)
    return home / "one", home / "two"


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    with open_browser(CHROMIUM, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def url(runs: tuple[Path, Path]) -> Iterator[str]:
    port = find_free_port("127.0.0.1")
    command = [sys.executable, "-m", "megatron_rl.observe.viewer", *map(str, runs), "--port", str(port)]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout.readline() == f"http://127.0.0.1:{port}/\n"
        yield f"http://127.0.0.1:{port}/"
    finally:
        served.kill()
        served.wait()


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
VIEWS = (
    "runs",
    "settings",
    "examples?run=one",
    "curves?run=one&run=two",
    "rollouts?run=one",
    "group?run=one&step=1&group=1",
    "episode?run=one&step=1&row_index=3",
)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_fits_its_window(width: int, scheme: str, page: BrowserPage, url: str) -> None:
    """No view is wider than the window, text contrasts with its background, attack texts are shown
    as text, and the console is empty.
    """
    page.set_window(width=width, scheme=scheme)
    page.console_messages.clear()
    for view in VIEWS:
        page.navigate(f"{url}#/{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        look = "(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))"
        ink, paper = ([int(part) for part in each[4:-1].split(",")] for each in page.evaluate(look))
        assert (sum(paper) < 200 < 500 < sum(ink)) if scheme == "dark" else (sum(ink) < 200 < 500 < sum(paper)), (ink, paper)
        assert page.evaluate("document.title") == "rollouts" and not page.evaluate(
            "document.querySelectorAll('main script, main h1').length"
        )
    assert page.console_messages == []


@needs_chromium
def test_screen_readers(page: BrowserPage, url: str) -> None:
    """Every input has a label, every image a description, every column header a scope, and every
    navigation, region and chart a name.
    """
    unnamed = """[...document.querySelectorAll('main input, main select, header input, img, thead th, nav, [role]')].filter(each =>
        each.matches('input, select') ? !each.labels.length || !each.labels[0].textContent.trim()
        : each.tagName === 'IMG' ? !each.alt : each.tagName === 'TH' ? !each.scope
        : each.id !== 'banner' && !each.getAttribute('aria-label')
    ).map(each => each.outerHTML.slice(0, 200))"""
    num_inputs = 0
    for view in VIEWS:
        page.navigate(f"{url}#/{view}")
        assert page.evaluate(unnamed) == [], view
        num_inputs += page.evaluate("document.querySelectorAll('main input, main select').length")
    assert num_inputs >= 20
    page.evaluate("document.querySelector('main').append(...['img', 'input', 'nav'].map(tag => document.createElement(tag))), 0")
    assert page.evaluate(unnamed) == ["<img>", "<input>", "<nav></nav>"]


@needs_chromium
def test_curves_of_two_runs(page: BrowserPage, url: str) -> None:
    """Two runs have one line each, in different colors; with one run selected there is one line, in
    the same color as before. The legend has its last value, and the value at the pointer.
    """
    page.set_window(width=1280)
    lines = "document.querySelectorAll('#main .card:first-child svg polyline, #main .card:first-child svg path').length"
    page.navigate(f"{url}#/curves?run=one&run=two")
    both = page.evaluate(lines)
    page.navigate(f"{url}#/curves?run=two")
    assert both == 2 * page.evaluate(lines) > 0
    colors = "[...document.querySelectorAll('#runs span.run1, #main .card:first-child .run1')].map(each => getComputedStyle(each).color)"
    assert len(page.evaluate(colors)) == 3 and len(set(page.evaluate(colors))) == 1
    legend = "document.querySelector('#main .card:first-child .legend').innerText"
    assert page.evaluate(legend) == "two 0.5 (step 1)"
    move = "new PointerEvent('pointermove', { clientX: document.querySelector('svg.chart').getBoundingClientRect().left + 5 })"
    page.evaluate(f"document.querySelector('svg.chart').dispatchEvent({move}), 0")
    assert page.evaluate(legend) == "two 0 (step 0)"


@needs_chromium
def test_smoothing_and_zoom(page: BrowserPage, url: str) -> None:
    """A smoothed line is drawn over the raw one, and the choice is part of the address. Dragging
    shows the chosen steps only, until the whole run is asked for.
    """
    page.navigate(f"{url}#/curves?run=two&smoothing=0.9")
    first = "document.querySelector('#main .card')"
    assert page.evaluate(f"{first}.querySelectorAll('polyline').length") == 2
    # The average of 0 and 0.5 with weight 0.9, without bias: 0.05 / 0.19
    assert page.evaluate(f"{first}.querySelector('.legend').innerText") == "two 0.2632 (step 1)"
    drag = "(kind, share) => {{ const svg = {0}.querySelector('svg'), box = svg.getBoundingClientRect(); "
    drag += "svg.dispatchEvent(new PointerEvent(kind, {{ clientX: box.left + share * box.width }})); }}"
    page.evaluate(f"[['pointerdown', 0.5], ['pointerup', 1]].map(each => ({drag.format(first)})(...each)), 0")
    assert page.evaluate(f"{first}.querySelectorAll('polyline').length + '/' + {first}.querySelectorAll('circle').length") == "0/2"
    page.evaluate(f"{first}.querySelector('.legend button').click(), 0")
    assert page.evaluate(f"{first}.querySelectorAll('polyline').length") == 2


@needs_chromium
def test_presets_and_hidden_columns(page: BrowserPage, url: str) -> None:
    """A preset sets its filters, and columns with one value are hidden."""
    page.navigate(f"{url}#/rollouts?run=one")
    head = page.evaluate("[...document.querySelectorAll('th')].map(each => each.innerText.replace(/ [↑↓]/, '')).join()")
    assert (
        head == "step,example,source,group,sample,image,question,expected,response,reward,terms,stop reason,sampled,errors,mismatch,version"
    )
    page.evaluate("[...document.querySelectorAll('.presets a')].find(each => each.innerText === 'mixed groups').click(), 0")
    page.wait_until("location.hash.includes('is_mixed=true') && document.querySelectorAll('tbody tr').length === 6")
    assert page.evaluate("document.querySelector('.presets .here').innerText") == "mixed groups"


@needs_chromium
def test_keys(page: BrowserPage, url: str) -> None:
    """Keys lead from the table to an episode, to its neighbors but not beyond the last one, to its
    group, and to a member of the group.
    """
    page.navigate(f"{url}#/rollouts?run=one")
    for key in ("j", "j", "ArrowDown", "k", "Enter"):
        page.press_key(key)
    page.wait_until("document.body.dataset.shown == 'episode' && location.hash.includes('row_index=1')")
    last = 3 + len(ATTACKS) - 1
    page.navigate(f"{url}#/episode?run=one&step=0&row_index={last - 1}")
    for step, place, sample in ((0, last, len(ATTACKS) - 1), (1, 0, 0), (1, 1, 1)):
        page.press_key("j")
        page.wait_until(f"document.querySelector('h2').innerText.includes('step {step}, sample {sample} ')")
        assert page.evaluate("location.hash").endswith(f"step={step}&row_index={place}")
    page.navigate(f"{url}#/episode?run=one&step=1&row_index={last}")
    page.press_key("j")
    page.press_key("k")
    page.wait_until(f"document.querySelector('h2').innerText.includes('step 1, sample {len(ATTACKS) - 2} ')")
    assert page.evaluate("document.getElementById('banner').innerText") == ""
    page.press_key("g")
    page.wait_until("document.body.dataset.shown == 'group'")
    for key in ("j", "ArrowDown", "k", "j", "Enter"):
        page.press_key(key)
    page.wait_until("document.body.dataset.shown == 'episode'")
    assert page.evaluate("location.hash").endswith("row_index=4")


@needs_chromium
def test_neighbors_in_a_filtered_table(page: BrowserPage, url: str) -> None:
    """From a sorted or filtered table, keys and links lead to the neighbors in that table, and a
    link leads back to it. The sorted column is shown before the texts.
    """
    page.navigate(f"{url}#/rollouts?run=one&step_to=1&example=e0&sort=reward&descending=true")
    expected = [(step, 2 - place // 2) for place in range(6) for step in (place % 2,)]
    rows = page.evaluate("[...document.querySelectorAll('tbody tr')].map(row => row.querySelector('a').hash)")
    assert [tuple(map(int, re.findall(r"(?:step|row_index)=(\d+)", row))) for row in rows] == expected
    page.press_key("j")
    page.press_key("Enter")
    for step, row in (expected[0], expected[1], expected[2]):
        page.wait_until(f"location.hash.endsWith('step={step}&row_index={row}')")
        page.wait_until(f"document.querySelector('h2')?.innerText.includes('step {step}, sample {row} ')")
        page.press_key("j")
    page.wait_until(f"document.querySelector('h2').innerText.includes('step {expected[3][0]}, sample {expected[3][1]} ')")
    page.evaluate("[...document.querySelectorAll('.presets a')].find(each => each.innerText === 'list of rollouts').click(), 0")
    page.wait_until("document.body.dataset.shown === 'rollouts' && location.hash.includes('sort=reward')")
    page.navigate(f"{url}#/rollouts?run=one&sort=num_sampled")
    head = page.evaluate("[...document.querySelectorAll('th')].map(each => each.innerText.replace(/ [↑↓]/, '')).join()")
    assert head.startswith("step,example,source,group,sample,sampled,image,question")
    assert page.evaluate("document.querySelector('th[aria-sort=ascending]').innerText") == "sampled ↑"


@needs_chromium
def test_thumbnails(runs: tuple[Path, Path], page: BrowserPage, url: str) -> None:
    """A row shows the rollout's first image, which leads to the rollout."""
    page.navigate(f"{url}#/rollouts?run=one")
    first = "document.querySelector('td.thumbnail a')"
    page.wait_until(f"{first}.querySelector('img').complete")
    assert page.evaluate(f"{first}.querySelector('img').src").endswith(f"/picture/one/{picture(0, width=28, height=28).key}.png")
    assert page.evaluate(f"{first}.querySelector('img').naturalWidth") == 28
    assert page.evaluate(f"{first}.hash") == "#/episode?run=one&step=0&row_index=0"


@needs_chromium
def test_settings_and_metrics_over_a_setting(runs: tuple[Path, Path], page: BrowserPage, url: str) -> None:
    """The settings view marks the settings that differ. Over a setting, a chart has a dot for each
    run, at the mean of the last tenth of its steps.
    """
    try:
        for run, rate in zip(runs, ("1e-06", "0.001"), strict=True):
            (run / "config.yaml").write_text(f"stage: rl\noptim: {{lr: {rate}}}\nrun: {{steps: 9}}\n")
        page.navigate(f"{url}#/settings")
        cells = (
            "[...document.querySelectorAll('tbody tr')].map(row => [...row.children].map(each => each.innerText).join() + row.className)"
        )
        assert page.evaluate(cells) == ["optim.lr,1e-06,0.001differs", "run.steps,9,9", "stage,rl,rl"]
        page.evaluate("document.querySelector('.filters .check input').click(), 0")
        assert page.evaluate(cells) == ["optim.lr,1e-06,0.001differs"]
        page.navigate(f"{url}#/curves?run=one&run=two&by=optim.lr&find=reward/mean")
        legend = page.evaluate("[...document.querySelectorAll('.legend span')].map(each => each.innerText)")
        assert legend == ["one 0.5 (1e-06)", "two 0.5 (0.001)"]
        assert page.evaluate("document.querySelectorAll('svg.chart circle').length") == 2
        assert "optim.lr (logarithmic)" in page.evaluate("document.querySelector('svg.chart').textContent")
    finally:
        for run in runs:
            (run / "config.yaml").unlink()


@needs_chromium
def test_keys_of_every_view(page: BrowserPage, url: str) -> None:
    """Keys open and close the list of keys, select views by number, leave the search box (Escape),
    and select a chart and open it alone.
    """
    page.navigate(f"{url}#/rollouts?run=one")
    page.press_key("?")
    told = page.evaluate("document.getElementById('help').innerText")
    assert page.evaluate("document.getElementById('help').open") and "the group of a rollout" in told
    page.press_key("1")
    assert page.evaluate("location.hash").startswith("#/rollouts"), "what lies below the list is not steered"
    page.press_key("?")
    assert not page.evaluate("document.getElementById('help').open")
    page.press_key("1")
    page.wait_until("document.body.dataset.shown == 'curves' && !!document.querySelector('main .charts')")
    page.press_key("/")
    page.press_key("j")
    page.press_key("Escape")
    assert page.evaluate("document.querySelector('.chosen') === null && document.activeElement === document.body")
    page.press_key("j")
    title = page.evaluate("document.querySelector('.chosen h3').innerText")
    page.press_key("Enter")
    page.wait_until(f"[...document.querySelectorAll('main h3')].map(each => each.innerText).join() === '{title}'")
    page.press_key("2")
    page.wait_until("document.body.dataset.shown == 'rollouts'")


@needs_chromium
def test_a_picture_that_is_missing(runs: tuple[Path, Path], page: BrowserPage, url: str) -> None:
    """A missing image is reported in its place, and the console is empty."""
    file = runs[0] / "rollouts" / image_file_name(picture(1).key)
    content = file.read_bytes()
    try:
        file.unlink()
        page.console_messages.clear()
        page.navigate(f"{url}#/episode?run=one&step=1&row_index=0")
        assert f"the image file is missing: {picture(1).key}" in page.evaluate("document.body.innerText") and page.console_messages == []
    finally:
        file.write_bytes(content)


@needs_chromium
def test_tokens_are_colored(page: BrowserPage, url: str) -> None:
    """Coloring by a column gives two sampled tokens different shades if their values differ and the
    same shade if they are equal.
    """
    for color in COLORS:
        page.navigate(f"{url}#/episode?run=one&step=1&row_index=0&color={color}")
        shades = page.evaluate("[...document.querySelectorAll('.tokens .sampled')].map(each => each.style.backgroundColor)")
        assert len(shades) == 2 and (len(set(shades)) == 2) == (color not in ("loss_mask", "weight_versions")), (color, shades)


@needs_chromium
def test_a_run_that_goes_on_is_followed(runs: tuple[Path, Path], page: BrowserPage, url: str) -> None:
    """A step that is written while the page is open appears, but not while the user is typing."""
    page.navigate(f"{url}#/rollouts?run=two&sort=step&descending=true")
    assert page.evaluate("document.querySelector('tbody tr td').innerText") == "1"
    page.evaluate("document.querySelector('input[type=number]').focus()")
    grow(runs[1], 2)
    page.wait_until("performance.getEntriesByType('resource').filter(each => each.name.includes('api/runs')).length >= 3")
    assert page.evaluate("document.querySelector('tbody tr td').innerText") == "1"
    page.evaluate("document.activeElement.blur()")
    for _ in range(2):
        page.press_key("j")
    chosen = page.evaluate("document.querySelector('.chosen a').hash")
    page.wait_until("document.querySelector('tbody tr td').innerText == '2'")
    assert page.evaluate("document.querySelector('.chosen a').hash") == chosen, "a choice stays where rows are put before it"
    assert "step 2" in page.evaluate("document.getElementById('runs').innerText")


def test_words_of_a_tokenizer(random_model: Path, tmp_path: Path) -> None:
    """The prompt is shown as the policy received it, with an image's placeholders as one, and each
    token is shown as its text.
    """
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    prompt = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>Which color?<|im_end|>\n"
    shown, ids = picture(0, width=56, height=56), tokenizer(prompt, add_special_tokens=False)["input_ids"]
    made = rollout(0, 1.0, step=0)
    context = TokenSequence()
    context.extend(ids, images=(shown,))
    context.extend(said := tokenizer("red<|im_end|>", add_special_tokens=False)["input_ids"], logprobs=[-0.5] * len(said))
    told_back = tokenizer("\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Look again.<|im_end|>\n<|im_start|>assistant\n")[
        "input_ids"
    ]
    context.extend(told_back)
    context.extend(tokenizer("blue")["input_ids"], logprobs=[-0.5] * len(tokenizer("blue")["input_ids"]))
    made.sequences, made.turns[0].token_span, made.turns[0].images = [context], (len(ids), len(ids) + len(said)), []
    made.turns.append(Turn(sequence=0, token_span=(len(ids) + len(said) + len(told_back), len(context.token_ids)), text="blue"))
    folder = tmp_path / "run"
    write_step(step_path(folder / "rollouts", 0), [made], step=0, num_gen_batches=1)
    asked: dict[str, object] = {"run": "run", "step": 0, "row_index": 0}
    client = TestClient(create_app(label_folders([folder]), hosts=["testserver"]))
    assert client.get("/api/episode", params=asked).json()["prompt"] == "", "nobody says where its tokenizer lies"
    (folder / "config.yaml").write_text(f"model: {{path: {random_model}}}\n")
    told = client.get("/api/episode", params=asked).json()
    assert told["no_words"] == "" and told["prompt"] == prompt.replace("<|image_pad|>" * 16, "<|image_pad|> \u00d7 16 ")
    assert [(turn["observation"], turn.get("is_new_prompt")) for turn in told["turns"]] == [("[image]Look again.", False), ("", None)]
    assert "".join(told["sequences"][0]["tokens"])[: len(prompt) + 13] == prompt + "red<|im_end|>"
    other = TokenSequence()
    other.extend(told_back)
    other.extend([5], logprobs=[-0.5])
    made.sequences, made.turns[1].sequence, made.turns[1].token_span = [context, other], 1, (len(told_back), len(told_back) + 1)
    write_step(step_path(folder / "rollouts", 0), [made], step=0, num_gen_batches=1)
    turns = client.get("/api/episode", params=asked).json()["turns"]
    assert [(turn["observation"], turn.get("is_new_prompt")) for turn in turns] == [("[image]Look again.", True), ("", None)]
    (folder / "config.yaml").write_text(f"model: {{path: {tmp_path}}}\n")
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    told = TestClient(create_app(label_folders([folder]), hosts=["testserver"])).get("/api/episode", params=asked).json()
    assert re.match(rf"{tmp_path}/tokenizer.json cannot be read \(\S.*\)$", told["no_words"])
    assert told["sequences"][0]["tokens"][0] == str(ids[0])
