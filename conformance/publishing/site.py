"""MkDocs hooks: pages and files from outside docs/, pictures made from records, and links that lead somewhere.

In the repository a link leads to a file; on the site it leads to the page made of it, to the record itself, or, for a
source file, it becomes its path. A link to nothing is a warning, and warnings end the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from conformance.publishing.pictures import Picture, pictures_of
from conformance.publishing.rows import read_results

PAGES_ELSEWHERE = {
    "results/README.md": "records.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
    "conformance/models/pydoc/README.md": "trained-model.md",
}
"""Pages of the site whose text is not in docs/: where it is, and their name on the site."""
_NOT_MADE = {"README.md"}
_GROUPS = ("gaps", "speed", "steps", "memory")
_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^()\s]+)\)")
_PICTURES = re.compile(r"<!-- pictures: ([a-z ]+) -->")
_log = logging.getLogger("mkdocs.plugins.conformance")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, records and pictures that are not in docs/."""
    root = project_folder(config)
    for source, name in PAGES_ELSEWHERE.items():
        if source not in _NOT_MADE:
            files.append(File.generated(config, name, content=(root / source).read_text(encoding="utf-8")))
    for path in sorted((root / "results").rglob("*.json")):
        relative = path.relative_to(root / "results")
        if relative.parts[0] != "local":
            files.append(File.generated(config, f"data/{relative.as_posix()}", abs_src_path=str(path)))
    results = read_results(root)
    groups = {group: pictures_of(group, results) for group in _GROUPS}
    for picture in (picture for group in groups.values() for picture in group):
        files.append(File.generated(config, f"pictures/{picture.name}", content=picture.svg))
    config.extra["pictures"] = groups
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put pictures in their places and turn links around."""
    root, name = project_folder(config), page.file.src_uri
    elsewhere = {made: source for source, made in PAGES_ELSEWHERE.items() if source not in _NOT_MADE}
    folder = posixpath.dirname(elsewhere.get(name, f"docs/{name}"))
    markdown = _PICTURES.sub(lambda match: figures(match[1].split(), config.extra["pictures"]), markdown)
    known = {file.src_uri for file in files}
    return _LINK.sub(lambda match: turned(match[1], match[2], folder, root, known, name), markdown)


def figures(groups: list[str], pictures: dict[str, list[Picture]]) -> str:
    """Return the pictures of groups as Markdown, or that there is nothing to draw."""
    parts = []
    for group in groups:
        if not pictures[group]:
            parts.append(f"Picture ({group}): not measured, no published record has what it needs.")
        for picture in pictures[group]:
            alt = picture.alt.replace("[", "(").replace("]", ")")
            parts.append(f"![{alt}](pictures/{picture.name})\n\n*{picture.caption}*")
    return "\n\n".join(parts)


def turned(text: str, target: str, folder: str, root: Path, known: set[str], page: str) -> str:
    """Return a link as it must be on the site; folder: of the page's text in the repository."""
    path, _, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:") or path in known:
        return f"[{text}]({target})"
    source = posixpath.normpath(posixpath.join(folder, path))
    suffix = f"#{anchor}" if anchor else ""
    if source in PAGES_ELSEWHERE:
        return f"[{text}]({PAGES_ELSEWHERE[source]}{suffix})"
    for prefix, place in (("docs/", ""), ("results/", "data/")):
        name = place + source.removeprefix(prefix)
        if source.startswith(prefix) and name in known:
            return f"[{text}]({name}{suffix})"
    if not (root / source).exists():
        _log.warning("%s: the link to %s leads nowhere", page, target)
    return text if source.endswith(text.strip("`")) else f"{text} (`{source}`)"


def project_folder(config: MkDocsConfig) -> Path:
    """Return the folder that mkdocs.yml is in."""
    path: Any = config.config_file_path
    return Path(path).parent
