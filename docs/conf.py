"""How Sphinx builds the site: ``make docs``.

The source folder is the root of the repository, so that links between README.md, docs/ and benchmarks/ are the same in the
repository and on the site.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site"))

project = html_title = "whale_tf"
extensions = ["myst_parser", "notebook", "reference", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**"]
exclude_patterns = [".*", "out", "tests", "models", "examples", "whale_tf", "graph_editor", "bridges", "patterns"]  # not searched

html_theme = "furo"
html_extra_path = ["site/root"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = html_copy_source = False
copybutton_prompt_text = "$ "

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # every heading can be linked to, as on GitHub
myst_links_external_new_tab = False

napoleon_use_rtype = False
python_maximum_signature_line_length = 90
