"""What the site has beyond the pages of `docs/`, for mkdocs (mkdocs.yml).

Links that lead out of `docs/` go to the repository, measurements say when they were last changed, and the explorer's
page has one to try, made from the example of the README.
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

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_OUTSIDE = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_TRY = """

## Try it

A GPT of 6.9 billion parameters on four A100: [the explorer](try/explore.html), and [the report](try/report.html).
Profile and plan were made by the commands that the README shows.
"""


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """The page with addresses in the repository for files outside `docs/`; raises `PluginError` for one not there."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]

    def address(link: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent.joinpath(link["path"]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: there is no {link['path']}")
        return f"]({repository}/blob/main/{target.relative_to(ROOT).as_posix()}{link['anchor'] or ''})"

    text = _OUTSIDE.sub(address, markdown)
    if page.file.src_uri.startswith("measurements/"):
        heading, _, rest = text.partition("\n")
        return f"{heading}\n{_last_changed(page.file.abs_src_path)}\n{rest}"
    return text + _TRY if page.file.src_uri == "explorer.md" else text


def _last_changed(path: str | None) -> str:
    """When the rows were committed, as git knows it; in a copy without history nobody knows."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return ""
    date = _git("log", "-1", "--format=%as", "--", str(path))
    return f"\n*Last changed on {date}.*\n" if date else ""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The files of the site with the example's pages."""
    with TemporaryDirectory() as folder:
        for line in (*COMMANDS, *PAGES):
            said(line, Path(folder))
        for name in ("report.html", "explore.html"):
            content = Path(folder, name).read_text(encoding="utf-8")
            files.append(File.generated(config, f"try/{name}", content=content))
    return files
