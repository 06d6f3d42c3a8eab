"""What the pages of this site have beyond MyST, such as differences between scripts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import click
from differences import block
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.domains.python import PyMethod, PyProperty, PythonDomain
from sphinx.util import docname_join, logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.matching import patfilter

logger = logging.getLogger(__name__)
# Characters of a line of code; a longer line of text is a message.
_WIDTH = 99


def show_code(app: Sphinx, doctree: nodes.document) -> None:
    """Show differences with their signs, and wrap text of which a line is long: a message."""
    for code in list(doctree.findall(nodes.literal_block)):
        text = code.astext()
        if code.get("language") == "diff":
            code.replace_self(nodes.raw("", block(text), format="html"))
        elif code.get("language") == "text" and _is_long(text):
            code["classes"].append("wrap")


def _is_long(text: str) -> bool:
    return any(len(line) > _WIDTH for line in text.splitlines())


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
    source[0] = re.sub(r"\]\((?:\.\./)+(apps(?:/\w+)?)/README\.md", r"](/\1.md", source[0])


def show_listed_applications(app: Sphinx, path: Path, docname: str, source: list[str]) -> None:
    """Do the same in the list of applications, which lies beside them, and find its pictures."""
    if docname == "apps":
        text = re.sub(r"\]\((\w+)/README\.md", r"](/apps/\1.md", source[0])
        source[0] = text.replace('src="', 'src="../apps/')


def index_what_people_search_for(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn ``<!-- search: deadlock, hang -->`` into entries of the index, the first hits."""

    def entries(comment: re.Match[str]) -> str:
        return "```{index} ! " + comment[1].replace(", ", ", ! ") + "\n```"

    source[0] = re.sub("^<!-- search: (.+) -->$", entries, source[0], flags=re.MULTILINE)


def hide_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn a comment with the word ``toctree`` and the pages below this one into a toctree."""

    def toctree(comment: re.Match[str]) -> str:
        kind, content = comment.groups()
        options, pages = re.fullmatch(r"((?::.*\n)*)(.*)", content, re.DOTALL).groups()
        return f"```{{{kind}}}\n:hidden:\n{options}\n{pages}```"

    comment = re.compile(r"^<!-- ((?:optional-)?toctree)\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
    source[0] = comment.sub(toctree, source[0])


def lay_out_columns(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show what is between comments side by side, on a screen that is wide enough."""
    parts = {
        "<!-- columns -->": "::::{grid} 1 1 1 2\n:gutter: 2\n\n:::{grid-item}",
        "<!-- next column -->": ":::\n\n:::{grid-item}",
        "<!-- end of columns -->": ":::\n::::",
    }
    if "<!-- columns -->" in source[0]:
        source[0] = f"---\nhide-toc: true\n---\n\n{source[0]}"
    for comment, part in parts.items():
        source[0] = source[0].replace(comment, part)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    app.add_directive("optional-toctree", OptionalToctree)
    app.add_directive_to_domain("py", "method", Method, override=True)
    app.add_directive_to_domain("py", "property", Property, override=True)
    app.connect("missing-reference", resolve_by_last_name)
    app.connect("html-page-context", warn_of_internals)
    app.connect("source-read", name_files_beyond_the_site)
    app.connect("source-read", show_applications_on_the_site)
    app.connect("include-read", show_listed_applications)
    app.connect("source-read", index_what_people_search_for)
    app.connect("source-read", hide_contents)
    app.connect("source-read", lay_out_columns)
    app.connect("doctree-read", show_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
