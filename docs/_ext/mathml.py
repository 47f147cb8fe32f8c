"""Formulas as MathML, which browsers set themselves: no script, no font and no network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def visit_math(self: Any, node: nodes.math) -> None:
    """An inline formula."""
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_displayed_math(self: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own, in a box that scrolls where the page is narrow."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(tex2mathml(node.astext(), as_block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make this the renderer of formulas."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_math, None), block_renderers=(visit_displayed_math, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
