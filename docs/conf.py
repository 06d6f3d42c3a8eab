"""How Sphinx builds the site; ``nox -s docs`` runs it."""

import sys
from pathlib import Path

import chainermn

sys.path.insert(0, str(Path(__file__).parent))
from differences import ONLY_SEEN

project = "ChainerMN"
copyright = "the ChainerMN maintainers"
version = release = chainermn.__version__
html_title = f"ChainerMN {version}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "directives",
]
exclude_patterns = [
    *("_build", "jupyter_execute", "examples", "drawings", "tests", "results/raw"),
    "README.md",  # takes the place of index.md on GitHub
]

myst_enable_extensions = ["alert", "colon_fence", "deflist", "html_image"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks show what `nox -s notebooks` has stored in them

# A name in single backquotes in a docstring is that of a Python object.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    # Types in docstrings are prose, as in "ndarray of shape (n,)", or of Python's modules.
    ("py:(class|exc)", r"(?!chainermn).*"),
]
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "exclude-members": "initialize, on_error, serialize",  # a trainer calls them
}
napoleon_google_docstring = False
napoleon_use_ivar = True

toc_object_entries_show_parents = "hide"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = f".linenos, .{ONLY_SEEN}"
pygments_style = "default"  # of the few with enough contrast, one with red and green differences
pygments_dark_style = "github-dark"
