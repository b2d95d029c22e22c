"""The documentation as a site: `make docs` builds it with Sphinx, and warnings are errors.

Pages are the Markdown files beside this one, which read well without the site, too. The index
(README.md) is the table of contents: its sections become the site's.
"""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copyfile

from sphinx.application import Sphinx

from localkv import __version__

project = "localkv"
author = "The localkv authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"localkv {__version__}"
html_static_path: list[str] = []
html_copy_source = False
default_role = "code"
suppress_warnings = ["misc.highlighting_failure"]  # a command's help is no shell session
highlight_language = "none"
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
add_module_names = False
SOURCE = "https://github.com/localkv/localkv/blob/main/"
"""Where files are that the pages link to and the site does not have."""


def toctree(caption: str, names: list[str]) -> str:
    """A hidden table of contents: the site's side bar shows it."""
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]
    )


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Make a page of the repository one of the site."""
    if name == root_doc:
        for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
            caption = section.partition("\n")[0]
            names = re.findall(r"^\| \[[^\]]+\]\(([\w-]+)\.md\)", section, re.MULTILINE)
            if "python" in names:
                names.insert(names.index("python") + 1, "api")
            source[0] += toctree(caption, names)
    source[0] = re.sub(r"\]\(\.\./([^)]*)\)", rf"]({SOURCE}\1)", source[0])


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Show the index where a browser looks for it."""
    if error is None:
        copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", read)
    app.connect("build-finished", add_front_page)
