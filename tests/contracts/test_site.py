"""The documentation site: it builds without warnings, loads nothing from other hosts, its search
works without a network, its links have targets, and its generated pages are complete.
"""

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from megatron_rl.config import Settings
from megatron_rl_tools.docs.command_line import COMMANDS, PARSERS, read_arguments
from megatron_rl_tools.docs.configuration import list_settings
from megatron_rl_tools.docs.hooks import link_settings, render_source_link
from tests.conftest import ROOT
from tests.contracts.test_readme import keys
from tests.observe.test_viewer import CHROMIUM
from tests.support.browser import open_browser

pytest.importorskip("mkdocs", reason="mkdocs is not installed: bash launch/install.sh")


class PageParser(HTMLParser):
    """Collects what a page loads, its links and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links.append(given.get("href", ""))
        elif tag != "link" or not {"canonical", "prev", "next"} & set(given.get("rel", "").split()):
            self.loaded += [given[name] for name in ("src", "href", "srcset", "data", "poster") if name in given]


def is_elsewhere(address: str) -> bool:
    return bool(re.match(r"(https?:)?//", address.strip()))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "DOCS_SOURCE_URL"}
    built = subprocess.run(
        command, cwd=ROOT, env={**environment, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=250, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, PageParser]:
    return {str(path.relative_to(site)): PageParser(path.read_text()) for path in (*site.glob("*.html"), site / "viewer" / "index.html")}


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[str, PageParser]) -> None:
    """No page or style sheet of the site loads a script, style, font or image from elsewhere."""
    assert len(pages) >= 35 and all(page.loaded for page in pages.values())
    assert {name: [url for url in page.loaded if is_elsewhere(url)] for name, page in pages.items()} == {name: [] for name in pages}
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert len(styles) >= 3
    urls = [url for text in styles for url in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)]
    assert not [url for found in urls for url in found if is_elsewhere(url)]


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://unpkg.com/mermaid"></script>', '<link rel="stylesheet" href="//fonts.example/a.css">',
        '<img src="http://example.com/badge.svg">', '<iframe src="https://example.com"></iframe>',
    ],
)  # fmt: skip
def test_a_foreign_resource_is_noticed(planted: str) -> None:
    assert any(map(is_elsewhere, PageParser(planted).loaded))
    assert not PageParser('<a href="https://example.com">x</a><link rel="canonical" href="https://example.com">').loaded


def test_every_link_has_a_target(pages: dict[str, PageParser]) -> None:
    """Every link within the site leads to a page, and its fragment to an anchor of that page."""
    broken = []
    for name, page in pages.items():
        if name == "404.html":  # its links start at the root of the server
            continue
        for link in page.links:
            path, fragment = urlsplit(link).path, unquote(urlsplit(link).fragment)
            if urlsplit(link).scheme or link in ("", ".") or not (path.endswith(".html") or not path):
                continue
            target = pages.get(path or name)
            if target is None or (fragment and fragment not in target.anchors):
                broken.append((name, link))
    assert not broken
    assert any("configuration.html#run.steps" in page.links for page in pages.values())


def test_every_setting_is_documented_once(site: Path, pages: dict[str, PageParser]) -> None:
    """The reference has an anchor for every setting, and no settings that do not exist."""
    settings = {each.key for each in list_settings(Settings)}
    groups = {key for key in keys(Settings()) if any(other.startswith(f"{key}.") for other in keys(Settings()))}
    assert settings == keys(Settings()) - groups and len(settings) > 150
    assert settings <= pages["configuration.html"].anchors
    text = (site / "configuration.html").read_text()
    assert all(text.count(f'id="{key}"') == 1 for key in settings)


def test_defaults_are_those_of_the_dataclasses() -> None:
    found = {each.key: (each.type_name, each.default) for each in list_settings(Settings)}
    assert found["run.steps"] == ("int", "40") and found["model.path"] == ("str", "required")
    assert found["run.overwrite"] == ("bool", "false") and found["lora.targets"] == ("list[str]", "[attention,mlp]")


@pytest.mark.parametrize("name", ["launch/export.py", "launch/explain.py"])
def test_arguments_are_those_of_the_parser(name: str) -> None:
    """The documented flags are those that --help prints."""
    command = [sys.executable, "-W", "ignore", str(ROOT / name), "--help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout
    expected = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", printed.partition("examples:")[0])) - {"--help"}
    documented = {flag for each in read_arguments(ROOT / PARSERS[name]) for flag in each.flags if flag.startswith("-")}
    assert documented == expected and len(expected) >= 6


def test_every_program_of_launch_is_documented() -> None:
    listed = {name for names in COMMANDS.values() for name in names}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "launch").glob("*.py")} <= listed
    assert all((ROOT / name).is_file() for name in (*listed, *PARSERS.values()))


def test_how_links_are_rewritten() -> None:
    assert render_source_link("results", "../benchmarks/x.md", "") == "results (`benchmarks/x.md`)"
    assert render_source_link("types.py", "../megatron_rl/types.py", "") == "`megatron_rl/types.py`"
    assert render_source_link("types.py", "../megatron_rl/types.py", "https://h/blob/") == "[types.py](https://h/blob/megatron_rl/types.py)"
    linked = '<a class="setting" href="configuration.html#run.steps"><code>run.steps=2</code></a>'
    assert link_settings("<p><code>run.steps=2</code></p>") == f"<p>{linked}</p>"
    for kept in ("<h2><code>run.steps</code></h2>", '<a href="x"><code>run.steps</code></a>', "<code>run.stepz</code>", "<code>run</code>"):
        assert link_settings(kept) == kept


@pytest.fixture
def server(site: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}/"
        served.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_search_works_and_asks_no_other_host(server: str, tmp_path: Path) -> None:
    """In a browser, the search finds a setting, pages are not wider than the window, the console
    has no errors, and every resource came from the local server.
    """
    with open_browser(CHROMIUM, tmp_path) as page:
        for name in ("index.html", "recipes.html", "configuration.html"):
            page.set_window(width=400)
            page.call("Page.navigate", url=server + name)
            page.wait_until(f"location.pathname == '/{name}' && document.readyState == 'complete'")
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
        page.set_window(width=1280)
        page.call("Page.navigate", url=f"{server}index.html?q=log_probs_chunk_size")
        found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        page.wait_until(f"location.search && {found}.some(link => link.includes('configuration.html'))")
        loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert any("search" in name for name in loaded)
        assert [name for name in loaded if not name.startswith((server, "data:", "blob:"))] == []
        assert not [message for message in page.console_messages if '"error"' in message]
