"""Build the documentation site with Sphinx: `scripts/docs`."""

from __future__ import annotations

import re
from importlib import import_module

from docutils import nodes
from docutils.parsers.rst import Directive
from mermaid_render import mermaid_to_svg

import turbopump

project = "Turbopump"
author = project_copyright = "The Turbopump maintainers"
version = release = turbopump.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Turbopump {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]

# `Name` in a docstring links to that name.
default_role = "py:obj"

myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

autodoc_default_options = {
    "members": True,
    "inherited-members": "BaseException,Exception,Enum,Struct,tuple,int,str",
}
add_module_names = False
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80

# These packages import a name when it is first used. Sphinx looks at what is imported.
for _name in ("turbopump", "turbopump.admin", "turbopump.aio", "turbopump.spark"):
    _module = import_module(_name)
    vars(_module).update({public: getattr(_module, public) for public in _module.__all__})

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)([^)#]+)(#[^)]*)?\)")
_INCLUDED = {
    "benchmarks/README.md": "/benchmarks.md",
    "CHANGELOG.md": "/changelog.md",
    "CONTRIBUTING.md": "/contributing.md",
    "SECURITY.md": "/security.md",
}


class Diagram(Directive):
    """Draw a diagram while the site is built, so that pages need no script."""

    has_content = True

    def run(self):
        svg = mermaid_to_svg("\n".join(self.content), theme="neutral").decode()
        return [nodes.raw("", f'<figure class="diagram">{svg}</figure>', format="html")]


def list_errors(_app, docname, source):
    """Describe errors below what programs call, where autodoc would begin with them."""
    if docname == "api/turbopump":
        names = [each for each in turbopump.__all__ if _is_error(getattr(turbopump, each))]
        each_one = "".join(
            f".. autoexception:: turbopump.{name}\n   :no-inherited-members:\n" for name in names
        )
        source[0] = (
            source[0].replace("{errors}", ", ".join(names)).replace("{each error}", each_one)
        )


def _is_error(value):
    return isinstance(value, type) and issubclass(value, turbopump.TurbopumpError)


_DECISIONS = "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def list_decisions(_app, docname, source):
    """Add the decision records to the table of contents."""
    if docname == "adr/README":
        source[0] += _DECISIONS


def keep_links_inside(_app, docname, source):
    """Replace links to files outside docs/, which the site does not have.

    Pages that include such a file take the link; other links become plain text.
    """
    depth = docname.count("/") + 1

    def replaced(link):
        text, path, anchor = link.groups()
        if link[0].count("../") < depth:
            return link[0]
        target = _INCLUDED.get(path)
        return f"[{text}]({target}{anchor or ''})" if target else text

    source[0] = _OUTSIDE.sub(replaced, source[0])


_WITH_LONG_NAMES = ("compatibility", "reference/defaults", "reference/tested-guarantees")


def break_long_names(_app, pagename, _template, context, _doctree):
    """Let names of tests and settings that are longer than a column break between words."""
    if pagename in _WITH_LONG_NAMES:
        context["body"] = re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda name: re.sub(r"(?<=[_./:])(?=\w)|(?<=[a-z])(?=[A-Z])", "<wbr>", name[0]),
            context["body"],
        )


def setup(app):
    app.add_directive("mermaid", Diagram)
    app.connect("source-read", list_decisions)
    app.connect("source-read", list_errors)
    app.connect("source-read", keep_links_inside)
    app.connect("html-page-context", break_long_names)
