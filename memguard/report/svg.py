"""Draw a matplotlib figure as SVG: inline in a page, or as a file.

The figure is drawn in placeholder colours. Inline, they are replaced by CSS variables, so that one
drawing works in light mode, dark mode and print, and ids get the figure's key as prefix, so that
charts can share a page. A file gets the light colours and a background panel. Text stays text.
"""

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from memguard.errors import advise_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 420
"""Width of a drawing in units: fits a page, and text of size 12 is still readable on a phone."""

COLOURS = {
    "#010101": "var(--ink-soft)",
    "#020202": "var(--line)",
    "#030303": "var(--card)",
    "#040404": "var(--shade)",
    "#050505": "var(--base)",
    "#060606": "var(--ink)",
    **{f"#a0000{number}": f"var(--series-{number})" for number in range(1, 9)},
}
INK, GRID, CARD, SHADE, BASE, STRONG, *SERIES = COLOURS

LIGHT = {
    "--ink": "#1a212b",
    "--ink-soft": "#566172",
    "--line": "#dde1e7",
    "--card": "#ffffff",
    "--shade": "#eceff3",
    "--base": "#7b8494",
    "--series-1": "#c2410c",
    "--series-2": "#1f5fbf",
    "--series-3": "#0f766e",
    "--series-4": "#8b3fa8",
    "--series-5": "#9a6700",
    "--series-6": "#b01e5b",
    "--series-7": "#3b6d11",
    "--series-8": "#4a4fb8",
}
"""Light colours of the page, for drawings in files."""

Paint = Callable[["Figure"], None]

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    **dict.fromkeys(("text.parse_math", "text.usetex", "legend.frameon"), False),
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "axes.unicode_minus": True,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "legend.fontsize": 11.5,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.4,
}
_DROPPED = {"metadata", "style"}
_VARIABLE = re.compile(r"var\((--[a-z0-9-]+)\)")
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_DECIMALS = re.compile(r"\d+\.\d{3,}")


@contextmanager
def _drawing_settings(key: str) -> Iterator[None]:
    logger = logging.getLogger("matplotlib")
    level = logger.level
    # Without a home folder matplotlib says where its cache is instead.
    logger.setLevel(logging.ERROR)
    try:
        import matplotlib

        # matplotlib warns about glyphs that its font lacks; the browser has them.
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": key})
            yield
    finally:
        logger.setLevel(level)


def set_percent_axis(axes: Any, label: str) -> None:
    """Set the vertical axis to the range 0 to 100."""
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_ylabel(label)


def draw_svg(key: str, height: float, description: str, paint: Paint) -> str:
    """Paint a figure and return it as one ``<svg>`` element for a page, ``WIDTH`` units wide.

    ``key`` is unique on the page; ``paint`` draws into an empty figure, from texts already cleaned.
    """
    root = _draw(key, (WIDTH, height), description, paint)
    return ElementTree.tostring(root, encoding="unicode")


def draw_svg_file(size: tuple[float, float], description: str, paint: Paint) -> str:
    """Paint a figure of a size in pixels as an SVG file: light colours on a light panel."""
    width, height = (f"{length:g}" for length in size)
    root = _draw("picture", size, description, paint)
    del root.attrib["class"]
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("width", width)
    root.set("height", height)
    panel = {"x": "0.5", "y": "0.5", "rx": "10", "fill": "var(--card)", "stroke": "var(--line)"}
    panel |= {"width": f"{size[0] - 1:g}", "height": f"{size[1] - 1:g}"}
    root.insert(1, ElementTree.Element("rect", panel))
    for element in root.iter():
        for name, value in element.items():
            element.set(name, _VARIABLE.sub(lambda match: LIGHT[match[1]], value))
    drawing = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawing}\n'


def _draw(
    key: str, size: tuple[float, float], description: str, paint: Paint
) -> ElementTree.Element:
    if find_spec("matplotlib") is None:
        empty = ElementTree.Element("svg", {"viewBox": f"0 0 {size[0]:g} 40"})
        line = ElementTree.SubElement(empty, "text", {"x": "8", "y": "24"})
        line.set("style", f"font-size: 12px; font-family: 'DejaVu Sans'; fill: {INK}")
        line.text = f"No chart: {advise_install('matplotlib')}"
        return _build_root(empty, key, description, set())
    with _drawing_settings(key):
        # Imported here because reading a record or rendering a model card needs no matplotlib.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        paint(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    used = {name for element in root.iter() for name in _list_references(element)}
    return _build_root(root, key, description, used)


def _list_references(element: ElementTree.Element) -> Iterator[str]:
    for name, value in element.items():
        if _strip(name) == "href":
            yield value.removeprefix("#")
        yield from _REFERENCE.findall(value)


def _strip(name: Any) -> str:
    return str(name).rpartition("}")[2]


def _build_root(
    drawn: ElementTree.Element, key: str, description: str, used: set[str]
) -> ElementTree.Element:
    root = ElementTree.Element(
        "svg",
        {
            "class": "chart",
            "role": "img",
            "aria-label": description,
            "viewBox": drawn.get("viewBox", ""),
            # matplotlib sets these in a <style> element, which would affect the whole page.
            "stroke-linejoin": "round",
            "stroke-linecap": "butt",
        },
    )
    ElementTree.SubElement(root, "title").text = description
    root.extend(_copy(child, key, used) for child in drawn if _is_kept(child))
    return root


def _is_kept(element: ElementTree.Element) -> bool:
    if _strip(element.tag) == "defs":
        return any(_is_kept(child) for child in element)
    return _strip(element.tag) not in _DROPPED


def _copy(element: ElementTree.Element, key: str, used: set[str]) -> ElementTree.Element:
    """Copy an element without namespaces, with prefixed ids and the colours of the page."""
    attributes = {}
    for full_name, value in element.items():
        name = _strip(full_name)
        if name == "id":
            if value not in used:
                continue
            value = f"{key}-{value}"
        elif name == "href":
            value = f"#{key}-{value.removeprefix('#')}"
        elif name == "d":
            # A hundredth of a unit is less than a pixel of any screen.
            value = _DECIMALS.sub(lambda match: f"{float(match[0]):.2f}", " ".join(value.split()))
        elif name == "style":
            value = value.replace("'DejaVu Sans'", "system-ui, sans-serif")
            for drawn, shown in COLOURS.items():
                value = value.replace(drawn, shown)
        attributes[name] = _REFERENCE.sub(rf"url(#{key}-\1)", value)
    copy = ElementTree.Element(_strip(element.tag), attributes)
    copy.text = element.text if element.text and element.text.strip() else None
    copy.extend(_copy(child, key, used) for child in element if _is_kept(child))
    return copy
