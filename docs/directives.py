"""What the pages of this site have beyond MyST, such as differences between scripts."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from scriptdiff import shown, walk
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.domains.python import PyMethod, PyProperty, PythonDomain
from sphinx.util import docname_join, logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.matching import patfilter

from chainermn.communicators import registered

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]


class ScriptDiff(SphinxDirective):
    """``{script-diff} OLD NEW``: the differences that add the texts of the content's lines.

    Each is shown with its place in the script of a reader who has made the changes of the pages
    of this folder up to here.
    """

    required_arguments = 2
    has_content = True

    def run(self) -> list[nodes.Node]:
        scripts = [ROOT / argument for argument in self.arguments]
        here = Path(self.env.doc2path(self.env.docname))
        pages = sorted(here.parent.glob("step*.md"))
        for path in (*scripts, *pages):
            self.env.note_dependency(str(path))
        texts = [text for page in pages for text in shown(page.read_text(encoding="utf-8"))]
        steps = walk(*(path.read_text(encoding="utf-8") for path in scripts), texts)
        return [
            captioned_code(f"{scripts[0].name}, {piece.place(script)}", piece.html())
            for text, piece, script in steps
            if text in self.content
        ]


def captioned_code(caption: str, html: str) -> nodes.raw:
    """Return a block of code as Sphinx writes it, of which ``html`` is the inside."""
    caption = f'<div class="code-block-caption"><span class="caption-text">{caption}</span></div>'
    block = f'<div class="highlight-diff"><div class="highlight"><pre>{html}</pre></div></div>'
    wrapped = f'<div class="literal-block-wrapper docutils container">{caption}{block}</div>'
    return nodes.raw("", wrapped, format="html")


class OptionalToctree(TocTree):
    """``{optional-toctree}``: a toctree of patterns that may match nothing."""

    def run(self) -> list[nodes.Node]:
        patterns = [docname_join(self.env.docname, pattern) for pattern in self.content]
        found = any(list(patfilter(self.env.found_docs, pattern)) for pattern in patterns)
        return super().run() if found else []


class CommandHelp(SphinxDirective):
    """``{command-help} MODULE.COMMAND``: what a command of click's prints with ``--help``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module_name, name = self.arguments[0].rsplit(".", 1)
        command = getattr(importlib.import_module(module_name), name)
        context = click.Context(command, info_name=f"chainermn {name}", max_content_width=88)
        text = command.get_help(context)
        return [nodes.literal_block(text, text, language="text")]


class Communicators(SphinxDirective):
    """``{communicators}``: a table of all names, with the first line of each class's docstring."""

    def run(self) -> list[nodes.Node]:
        rows = ["| name | how gradients are averaged |", "|---|---|"]
        for name, kind in registered().items():
            self.env.note_dependency(inspect.getfile(kind))
            rows.append(f"| `{name}` | {(kind.__doc__ or '').splitlines()[0]} |")
        return self.parse_text_to_nodes("\n".join(rows))


def resolve_by_last_name(
    app: Sphinx, env: Any, node: Any, content: nodes.TextElement
) -> nodes.Node | None:
    """Find `MultiNodeOptimizer.update`, whatever module of the library documents it."""
    target = node.get("reftarget", "").lstrip(".")
    if node.get("refdomain") != "py" or not target:
        return None
    domain: PythonDomain = env.domains.python_domain
    names = [name for name in domain.objects if name == target or name.endswith(f".{target}")]
    if len({domain.objects[name].docname for name in names}) != 1:
        return None
    name = min(names, key=len)
    entry = domain.objects[name]
    uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    reference = nodes.reference("", "", content, internal=True, refuri=f"{uri}#{entry.node_id}")
    return reference


class Method(PyMethod):
    """A method without the word ``abstractmethod``: whoever calls it need not know."""

    def run(self) -> list[nodes.Node]:
        self.options.pop("abstractmethod", None)
        return super().run()


class Property(PyProperty):
    """A property without the word ``abstract``."""

    def run(self) -> list[nodes.Node]:
        self.options.pop("abstractmethod", None)
        return super().run()


def warn_of_internals(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Warn if a page shows what its readers have no use for."""
    for signature in doctree.findall(addnodes.desc_signature) if doctree else ():
        text = signature.astext()
        if re.search(r"^abstract|\b_\w+[.(]|\._|^_| object>", text):
            logger.warning("shows an internal: %s", text, location=page)


def name_files_beyond_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links of docs/results to files of the repository into the names of these files."""
    if docname.startswith("results/"):
        source[0] = re.sub(r"\[[^]]*\]\((?:\.\./){2}([^)]+)\)", r"`\1`", source[0])


def show_applications_on_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links to the READMEs of applications into links to the pages that include them."""
    source[0] = re.sub(r"\]\((?:\.\./)+(apps/\w+)/README\.md", r"](/\1.md", source[0])


def index_what_people_search_for(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn ``<!-- search: deadlock, hang -->`` into entries of the index, the first hits."""

    def entries(comment: re.Match[str]) -> str:
        return "```{index} ! " + comment[1].replace(", ", ", ! ") + "\n```"

    source[0] = re.sub("^<!-- search: (.+) -->$", entries, source[0], flags=re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("script-diff", ScriptDiff)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("communicators", Communicators)
    app.add_directive("optional-toctree", OptionalToctree)
    app.add_directive_to_domain("py", "method", Method, override=True)
    app.add_directive_to_domain("py", "property", Property, override=True)
    app.connect("missing-reference", resolve_by_last_name)
    app.connect("html-page-context", warn_of_internals)
    app.connect("source-read", name_files_beyond_the_site)
    app.connect("source-read", show_applications_on_the_site)
    app.connect("source-read", index_what_people_search_for)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
