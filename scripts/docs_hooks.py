"""What the site needs beyond the pages.

A page of docs/ links to files elsewhere in the repository, as ``../streamer/source.py``, and these
links work where the repository is shown. Here each such file becomes a page of the site, with its
text, so that they work there too. A link to what is not there is a warning, which `mkdocs build
--strict` ends with.

Names of the public interface lead to the reference wherever they stand in code.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#])")
NAME = re.compile(r'(?<!">)(<code>([A-Za-z_][\w.]*)(?:\(\))?</code>)')
CLASSES = set(re.findall(r'^    "([A-Z]\w+)",$', (ROOT / "streamer/__init__.py").read_text(), re.M))
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh"}
log = logging.getLogger("mkdocs.hooks.docs")


def outside(page: str, link: str) -> str | None:
    """The file of the repository that ``link`` on ``page`` leads to; None for one of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def target(path: str) -> str:
    """Where in the site the page of a file is."""
    return f"repository/{path}/README.md" if (ROOT / path).is_dir() else f"repository/{path}.md"


def text_of(path: str) -> str:
    """A file as a page: its text, or what is in a folder."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if not each.name.startswith((".", "_")))
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names)
    text = file.read_text()
    if file.suffix == ".md":  # its links lead elsewhere than they do from here
        return re.sub(r"\[([^\]]+)\]\((?!\w+:)[^)]+\)", r"\1", text)
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the files that are linked to."""
    wanted: set[str] = set()
    for file in files.documentation_pages():
        for link in LINK.findall(file.content_string):
            path = outside(file.src_uri, link)
            if path is None:
                continue
            if (ROOT / path).exists():
                wanted.add(path)
            else:
                log.warning("%s links to %s, which is not in the repository", file.src_uri, path)
    for path in sorted(wanted):
        page = File.generated(config, target(path), content=text_of(path))
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to these pages."""
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        path = outside(here, match[1])
        if path is None or not (ROOT / path).exists():
            return match[1]
        return posixpath.relpath(target(path), posixpath.dirname(here) or ".")

    return LINK.sub(lead, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have names lead to the reference. One that is not in it stays as it is."""

    def lead(match: re.Match[str]) -> str:
        name = match[2].removeprefix("streamer.")
        if name == match[2] and name.partition(".")[0] not in CLASSES:
            return match[0]
        return f'<autoref optional identifier="streamer.{name}">{match[1]}</autoref>'

    return NAME.sub(lead, html)
