"""What every page must be: well-formed, offline, without scripts."""

import re
from collections.abc import Collection
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link", "path", "circle", "rect", "use", "wbr"}
MAY_BREAK = "\x01"
"""Stands in the text of a page where a line may break inside a word."""


class PageParser(HTMLParser):
    """Checks that tags balance; collects tags, attributes, ids and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.policy_before_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "wbr":
            self.text.append(MAY_BREAK)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_page(page: str, links: Collection[str] = ()) -> PageParser:
    """Parse a page and check what holds for all of them; return what was parsed.

    Args:
        page: HTML.
        links: other pages that it may link to.
    """
    page.encode()
    parser = PageParser()
    parser.feed(page)
    parser.close()
    assert not parser.open, f"never closed: {parser.open}"
    names = [tag for tag, _ in parser.tags]
    assert not {"script", "iframe", "object", "embed", "link", "form", "base", "img"} & set(names)
    assert names.count("style") == 1
    assert names.count("html") == names.count("title") - names.count("svg") + icon_count(parser)
    policy = [a["content"] for tag, a in parser.tags if a.get("http-equiv")]
    assert policy
    assert policy[0].startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    ids = [attributes["id"] for _, attributes in parser.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id stands twice"
    for tag, attributes in parser.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if (tag, name) == ("a", "href") and value in links:
                continue
            if name in ("src", "href", "action", "srcset"):
                assert value.startswith("#"), f"{name}={value}"
                assert value[1:] in ids, f"{value} leads nowhere"
            assert not re.search(r"url\((?!#)", value), f"{name}={value}"
    assert "@import" not in page
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?\s*(?:https?:)?//", page)
    assert not re.search(r"url\(\s*[\"']?(?!#)", page)
    check_tables(parser)
    return parser


def icon_count(parser: PageParser) -> int:
    """Return how many drawings are mere icons, which have no title."""
    return sum(tag == "svg" and a.get("class") == "icon" for tag, a in parser.tags)


def check_tables(parser: PageParser) -> None:
    names = [tag for tag, _ in parser.tags]
    assert names.count("table") == names.count("caption")
    assert all(a.get("scope") in ("row", "col") for tag, a in parser.tags if tag == "th")
    charts = [a for tag, a in parser.tags if tag == "svg" and a.get("class") == "chart"]
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)


def words_of(parser: PageParser) -> str:
    """Return the text of a page with plain spaces and minus signs."""
    text = " ".join(parser.text).replace(f" {MAY_BREAK} ", "")
    text = text.replace("\u00a0", " ").replace("\u2212", "-")
    return re.sub(r"\s+", " ", text)
