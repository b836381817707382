"""What the site needs beyond the pages in this folder.

- The home page is the README and the changelog is ``CHANGELOG.md``: they are shown, not copied.
- A link is written as the repository browser needs it; on the site it leads to the same page, or to a copy of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: File of the repository → page of the site.
SHOWN = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
#: A block of code, which has no links however it looks.
BLOCK = re.compile(r"(^ *```.*?^ *```$)", flags=re.DOTALL | re.MULTILINE)


def in_repository(page: str) -> str:
    """Where a page of the site lies in the repository: ``start.md`` → ``docs/start.md``."""
    return next((file for file, shown in SHOWN.items() if shown == page), f"docs/{page}")


def site_path(path: str) -> str:
    """Where a file of the repository lies on the site: ``docs/start.md`` → ``start.md``."""
    return SHOWN.get(path, path.removeprefix("docs/"))


def target(page: str, link: str) -> str:
    """The file of the repository to which a link of a page leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), link))


def on_files(files: Any, config: Any) -> Any:
    for source, page in SHOWN.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        for _, link in LINK.findall(BLOCK.sub("", page.content_string)):
            path = target(page.src_uri, link)
            outside = not path.startswith("docs/") and path not in SHOWN
            if outside and (ROOT / path).is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        to = site_path(target(here, found[2]))
        return found[1] + posixpath.relpath(to, posixpath.dirname(here) or ".")

    parts = BLOCK.split(markdown)  # every second one is a block
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))
