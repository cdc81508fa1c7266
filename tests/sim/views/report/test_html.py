"""HTML: what is text stays text."""

from __future__ import annotations

from sim.views.report.html import Markup, element, join, table, text
from tests.sim.views.report.pages import Page


def test_text_is_escaped_and_markup_is_not() -> None:
    assert text("<b> & 'c'") == "&lt;b&gt; &amp; &#x27;c&#x27;"
    assert text(Markup("<b>")) == "<b>"
    assert element("p", "<i>", element("b", "&")) == "<p>&lt;i&gt;<b>&amp;</b></p>"
    assert join(["<", Markup("<br>")], "&") == "&lt;&amp;<br>"


def test_attributes_are_escaped_and_named_as_html_names_them() -> None:
    told = element("p", class_="a", data_key='"><script>', hidden=True, id=None)
    assert told == '<p class="a" data-key="&quot;&gt;&lt;script&gt;" hidden></p>'


def test_elements_without_content_have_no_end() -> None:
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_a_table_names_its_columns_and_rows() -> None:
    page = Page(table("What", ["a", "b"], [["x", 1], ["y", "<2>"]], left=(1,)))
    scopes = [each.get("scope") for name, each in page.elements if name == "th"]
    assert scopes == ["col", "col", "row", "row"]
    assert [e.get("class") for n, e in page.elements if n == "td"] == ["left"] * 2
    assert page.words == ["What", "a", "b", "x", "1", "y", "<2>"]
    assert not page.unclosed
