"""How Sphinx builds the site: ``make docs``.

Sources are read from the root of the repository, so that the links between pages, and
from pages to code, are the same on the site as in a clone.
"""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "kvsim"
author = "the authors of kvsim"
version = release = version_of("kvsim")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "notebooks/**", "tests/**.md"]
rooms = ("cache", "calibrate", "examples", "sim", "workloads")
include_patterns += [f"{room}/**.md" for room in rooms]
exclude_patterns = [".venv*", "build", "results", "traces", "**.py", "**/__pycache__"]
suppress_warnings = ["myst.header"]  # a page may skip a level of headings

# -- pages ----------------------------------------------------------------------

myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with what they show

# -- reference ------------------------------------------------------------------

default_role = "literal"
napoleon_google_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# -- the site -------------------------------------------------------------------

html_theme = "furo"
html_title = "kvsim"
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = "$ "
