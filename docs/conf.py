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
include_patterns = ["docs/*.md", "*.md", "benchmarks/*.md", "benchmarks/paper/README.md", "demo/README.md"]
exclude_patterns = ["README.md"]  # docs/index.md is the site's

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

default_role = "py:obj"  # a name in backticks is a link where the reference has it, else code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # of parameters the docstrings say what matters
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = f"hf_paged {version}"
html_show_sphinx = False
html_copy_source = False
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["templates"]
