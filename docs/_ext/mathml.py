"""Formulas as MathML, which browsers set themselves: no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

logger = logging.getLogger(__name__)

BARS = re.compile(r"<mo[^>]*>([|‖⟨⟩])</mo>")
PUNCTUATION = re.compile(r"[.,;:)!?’”]+")


class KeepPunctuation(SphinxPostTransform):
    """Give a formula the punctuation behind it, which would otherwise begin a line."""

    default_priority = 900
    formats = ("html",)

    def run(self, **options: Any) -> None:
        """Move it, in the whole page."""
        for formula in list(self.document.findall(nodes.math)):
            text = formula.next_node(nodes.Text, descend=False, siblings=True)
            after = formula.parent.index(formula) + 1
            if text is None or formula.parent[after] is not text:
                continue
            if found := PUNCTUATION.match(text):
                formula["tail"] = found.group()
                formula.parent[after] = nodes.Text(text[found.end() :])


def mathml(node: nodes.Element, as_block: bool = False) -> str:
    """A formula as MathML, in which bars and brackets keep their height and stand close."""
    source = re.sub(r"\\dots\b", r"\\ldots", node.astext())
    try:
        code = tex2mathml(source, as_block=as_block)
    except MathError as error:
        logger.warning("%s in the formula %s", error, source, location=node)
        return html.escape(source)
    return BARS.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', code)


def visit_math(self: Any, node: nodes.math) -> None:
    """An inline formula."""
    self.body.append(f'<span class="math">{mathml(node)}{node.get("tail", "")}</span>')
    raise nodes.SkipNode


def visit_displayed_math(self: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(mathml(node, as_block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make this the renderer of formulas."""
    app.add_post_transform(KeepPunctuation)
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_math, None), block_renderers=(visit_displayed_math, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
