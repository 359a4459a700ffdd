"""Hooks of mkdocs (mkdocs.yml): generated pages, recorded runs, links to files and settings."""

import html
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # mkdocs loads this file by its path
    sys.path.insert(0, str(ROOT))

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

from megatron_rl.config import Settings  # noqa: E402
from megatron_rl.observe.viewer.export import export_runs  # noqa: E402
from megatron_rl.observe.viewer.store import find_runs, label_folders  # noqa: E402
from megatron_rl_tools.docs import command_line, configuration  # noqa: E402

RECORDED_RUNS = ROOT / "benchmarks" / "recorded_runs"
SETTINGS = frozenset(setting.key for setting in configuration.list_settings(Settings))
GROUPS = frozenset(key.split(".")[0] for key in SETTINGS)
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
UNTOUCHED = re.compile(r"(<a\b.*?</a>|<h[1-6]\b.*?</h[1-6]>|<pre\b.*?</pre>)", re.DOTALL)
CODE = re.compile(r"<code>(?P<key>[a-z_]+(?:\.[a-z_0-9]+)*)(?P<value>(?:=[^<]*)?)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, configuration.PAGE, content=configuration.render_configuration()))
    files.append(File.generated(config, command_line.PAGE, content=command_line.render_command_line()))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Add the viewer's page with the recorded runs."""
    shutil.rmtree(Path(config.site_dir) / "viewer", ignore_errors=True)
    export_runs(label_folders(find_runs(RECORDED_RUNS)), Path(config.site_dir) / "viewer")


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Replace links to files outside of docs/.

    If DOCS_SOURCE_URL is set, a link leads to the file there. Otherwise, the text is followed by
    the path of the file.
    """
    return LINK.sub(lambda found: render_source_link(found["text"], found["target"], str(config.extra.get("source_url") or "")), markdown)


def render_source_link(text: str, target: str, source_url: str) -> str:
    """Return the Markdown for a link from a page in docs/ to a file of the repository."""
    path = posixpath.normpath(posixpath.join("docs", target))
    if source_url:
        return f"[{text}]({source_url.rstrip('/')}/{path})"
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def on_page_content(markup: str, page: Page, **_: Any) -> str:
    """Link the names of settings to the configuration reference."""
    if page.file.src_uri == configuration.PAGE:
        return markup
    return link_settings(markup)


def link_settings(markup: str) -> str:
    """Return HTML in which each setting in code font leads to its entry in the reference.

    Links, headings and blocks of code stay as they are.
    """
    parts = UNTOUCHED.split(markup)
    return "".join(part if index % 2 else CODE.sub(_link_setting, part) for index, part in enumerate(parts))


def _link_setting(found: re.Match[str]) -> str:
    key = html.unescape(found["key"])
    if key not in SETTINGS:
        return found[0]
    return f'<a class="setting" href="{configuration.PAGE.removesuffix(".md")}.html#{key}">{found[0]}</a>'
