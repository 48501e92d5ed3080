"""Sphinx's configuration: `make docs`.

The sources are the repository's own Markdown pages where they lie, so that a link that works on a code host works on
the site.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "hf_paged"
author = PROJECT["authors"][0]["name"]
version = release = PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "*.md", "examples/*.md", "benchmarks/**.md", "demo/README.md"]
exclude_patterns = ["README.md"]  # docs/index.md is the site's
# A link to a folder has no target here, and tables of results belong to no chapter. A test checks all links.
suppress_warnings = ["myst.xref_missing", "toc.not_included"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

default_role = "py:obj"  # a name in backticks is a link where the reference has it, else code
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

smartquotes_action = "D"  # dashes; it would turn quotes at the start of an item round

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"hf_paged {version}"
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
html_show_search_summary = False  # which a page that was opened as a file may not fetch
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["templates"]
