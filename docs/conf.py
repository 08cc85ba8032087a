"""Sphinx's configuration: Markdown pages, and a reference that is made from the code. tools/docs.sh builds the site."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_site"), str(DOCS.parent / "python")]

from netbottleneck import __version__  # noqa: E402

project = "netbottleneck"
author = "The netbottleneck authors"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "made"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]
nitpicky = True
# Signatures name types that the site has no page for.
nitpick_ignore_regex = [("py:.*", ".*")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"netbottleneck {release}"
html_static_path: list[str] = []
html_show_copyright = False
html_copy_source = False
