"""Hooks of mkdocs (mkdocs.yml): add to the site what the pages of `docs/` do not contain.

The title has the version, and links to files outside `docs/` lead to the repository. Pages of measurements have the
date of their last change. The explorer's page links to an example.
"""

import re
import subprocess
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from readme_example import COMMANDS, PAGES, said  # this folder is on the path while mkdocs loads hooks

import planner

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_OUTSIDE = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_TRY = """

## Try it

A GPT of 6.9 billion parameters on four A100: [the explorer](try/explore.html), and [the report](try/report.html).
Profile and plan were made by the commands that the README shows.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the repository's address, from `Homepage` in pyproject.toml, and the version."""
    homepage = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
    config.repo_url = homepage
    config.repo_name = homepage.removeprefix("https://github.com/")
    config.site_name = f"{config.site_name} {planner.__version__}"
    return config


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Replace links to files outside `docs/` by addresses in the repository.

    Raises:
        PluginError: A file does not exist.
    """

    def address(link: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent.joinpath(link["path"]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: there is no {link['path']}")
        return f"]({config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}{link['anchor'] or ''})"

    text = _OUTSIDE.sub(address, markdown)
    if page.file.src_uri.startswith("measurements/"):
        heading, _, rest = text.partition("\n")
        return f"{heading}\n{_last_changed(page.file.abs_src_path)}\n{rest}"
    return text + _TRY if page.file.src_uri == "explorer.md" else text


def _last_changed(path: str | None) -> str:
    """Return a line with the date of the page's last commit; empty in a checkout without its history."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return ""
    date = _git("log", "-1", "--format=%as", "--", str(path))
    return f"\n*Last changed on {date}.*\n" if date else ""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the report and the explorer of the example."""
    with TemporaryDirectory() as folder:
        for line in (*COMMANDS, *PAGES):
            said(line, Path(folder))
        for name in ("report.html", "explore.html"):
            content = Path(folder, name).read_text(encoding="utf-8")
            files.append(File.generated(config, f"try/{name}", content=content))
    return files
