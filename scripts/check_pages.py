"""Open every page below a folder in headless Chromium, and check what a reader meets there.

    python scripts/check_pages.py runs/quickstart     pages of runs, gates, comparison, and bundles

Of each HTML page, also of those inside archives (`memguard bundle`), at 1280, 768 and 390 px, in
light and dark: messages of the console, requests, what axe-core finds serious, and whether the page
scrolls sideways. Of each page, and of the links of each README.md: links to what is not there. Then
the words before a click, the printed pages, and ids of findings that are not printed (needs
pdftotext). Prints a row for each page; exits with 1 if something is wrong. Needs Debian's chromium
and the package axe-core-python.
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browser import Browser, Page

from memguard.records.audit_files import FINDINGS

WIDTHS = {1280: 800, 768: 1024, 390: 844}
"""Width and height of screens (CSS pixels)."""
COLUMNS = ("page", "words", "printed", "wrong")
_LINKS = "[...document.querySelectorAll('a[href]')].map((link) => link.getAttribute('href'))"
_IDS = "[...document.querySelectorAll('[id]')].map((one) => one.id)"
_WORDS = "document.body.innerText.split(/\\s+/).filter((word) => word).length"
_IN_MARKDOWN = re.compile(r"\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What was found on a page."""

    num_words: int
    """Visible before a click, at 1280 pixels."""
    num_printed: int
    wrong: tuple[str, ...]


def find_dead(path: Path, links: list[str], ids: set[str]) -> Iterator[str]:
    """Yield the links of a file that lead to nothing on this disk."""
    for link in dict.fromkeys(links):
        target, _, fragment = link.partition("#")
        if _ELSEWHERE.match(target):
            continue
        if target and not (path.parent / unquote(target)).exists():
            yield f"dead link {link}"
        if not target and fragment and fragment not in ids:
            yield f"dead link {link}"


def list_findings(path: Path) -> list[str]:
    """Return the ids that a report has to show, the worst hundred of findings.csv beside it."""
    places = (path.parent, path.parent.parent / "audit")
    if path.name != "report.html":
        return []
    file = next((p / FINDINGS for p in places if (p / FINDINGS).is_file()), None)
    if file is None:
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [row["id"] for row in csv.DictReader(lines)][:100]


def read_printed(page: Page) -> str | None:
    """Return the text of the printed page without blanks; None without pdftotext."""
    if shutil.which("pdftotext") is None:
        return None
    command = ["pdftotext", "-raw", "-", "-"]
    ended = subprocess.run(command, input=page.print_pdf(), capture_output=True, check=True)
    return re.sub(r"\s+", "", ended.stdout.decode("utf-8", errors="replace"))


def check_page(browser: Browser, path: Path, *, with_axe: bool = True) -> Checked:
    """Check a page at every width, in light and dark."""
    wrong: list[str] = []
    for width, height in WIDTHS.items():
        for dark in (False, True):
            page = browser.open(path, width=width, height=height, dark=dark)
            place = f"{width} {'dark' if dark else 'light'}"
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{place}: scrolls sideways")
            wrong += [f"{place}: console: {message}" for message in page.list_messages()]
            wrong += [f"{place}: requests {address}" for address in page.list_requests()]
            wrong += [f"{place}: {rule}" for rule in (page.list_violations() if with_axe else ())]
    page = browser.open(path)
    num_words = int(page.evaluate(_WORDS))
    wrong += find_dead(path, page.evaluate(_LINKS), {*page.evaluate(_IDS)})
    num_printed = page.count_printed_pages()
    wrong += [] if num_printed else ["prints no page"]
    printed = read_printed(page)
    if printed is not None:
        lost = [one for one in list_findings(path) if re.sub(r"\s+", "", one) not in printed]
        wrong += [f"{len(lost)} findings are not printed, such as {lost[0]}"] if lost else []
    return Checked(num_words=num_words, num_printed=num_printed, wrong=tuple(wrong))


def check_folder(browser: Browser, folder: Path) -> Iterator[tuple[str, Checked]]:
    """Yield each page below a folder, and of the archives in it, by its path there."""
    for path in sorted(folder.rglob("*.html")):
        yield str(path.relative_to(folder)), check_page(browser, path)
    for path in sorted(folder.rglob("README.md")):
        links = _IN_MARKDOWN.findall(path.read_text(encoding="utf-8"))
        dead = tuple(find_dead(path, links, {link[1:] for link in links if link[0] == "#"}))
        checked = Checked(num_words=0, num_printed=0, wrong=dead)
        yield str(path.relative_to(folder)), checked
    for path in sorted(folder.rglob("*.zip")):
        with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(path) as archive:
            archive.extractall(place)
            for name, checked in check_folder(browser, Path(place)):
                yield f"{path.relative_to(folder)}/{name}", checked


def main() -> int:
    """Print a row for each page; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    print(" | ".join(COLUMNS))
    is_wrong = False
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        for name, checked in check_folder(browser, folder):
            is_wrong |= bool(checked.wrong)
            wrong = "; ".join(checked.wrong) or "-"
            print(f"{name} | {checked.num_words} | {checked.num_printed} | {wrong}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
