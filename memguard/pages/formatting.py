"""Format numbers and clean text; each kind of number has one format.

A missing number is an en dash, or "n/a" if the reason is given next to it. Percentages never round
to 0 or 100 unless they are exactly that.

Ids, names and sentences of a record are untrusted. The template engine escapes them for HTML;
`clean_text` handles what escaping does not: control characters, characters that reverse the reading
direction, lone surrogates, and very long lines.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memguard.errors import spell_controls
from memguard.records import MIN_FOR_QUANTILES, RISK_NAMES, Interval, Rate, ResultRow

ELLIPSIS = "…"
NAME_LIMIT = 72
SENTENCE_LIMIT = 700
COMMAND_LIMIT = 4000

_LOCAL_PATH = re.compile(
    r"""(?<![\w/.\\~-])            # not inside a word or a longer path
        (?:file:/+ | ~[\w.-]*[/\\] | [A-Za-z]:(?:\\|/(?!/)) | \\\\
           | /(?!/) | (?<!:)//       # but not those of https://
           | \.{1,2}[/\\])
        [^\s'"`,;()\[\]{}<>|]+""",
    re.VERBOSE,
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")


def clean_text(text: str, limit: int = SENTENCE_LIMIT) -> str:
    """Return any text on one line, cut in its middle, with control characters spelled out.

    ``limit`` counts the ellipsis, and a replaced character once.
    """
    if len(text) > limit:
        tail = limit // 3
        text = text[: limit - tail - 1] + ELLIPSIS + text[len(text) - tail :]
    return spell_controls(text)


def clean_name(text: str, limit: int = NAME_LIMIT) -> str:
    """Clean an id or a name; an empty one becomes ``(empty)``."""
    return clean_text(text, limit) or "(empty)"


def clean_words(name: str) -> str:
    """Clean a name with underscores and write it as words: ``Beam search``."""
    words = clean_name(name.replace("_", " "), 40)
    return words[:1].upper() + words[1:]


def shorten_place(place: str) -> str:
    """Return the last three parts of a path; hub ids and shorter paths are unchanged."""
    parts = [part for part in re.split(r"[/\\]", place) if part]
    return place if len(parts) <= 3 else f"{ELLIPSIS}/{'/'.join(parts[-3:])}"


def hide_paths(text: str) -> str:
    """Replace local paths, which reveal details of a machine, by ``(local path)``."""
    return _LOCAL_PATH.sub("(local path)", text)


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form of a Hugging Face hub id (``org/name`` or ``name``)."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


MISSING = "–"
NEVER = "never"
NOT_AVAILABLE = "n/a"
NBSP = "\u00a0"
MINUS = "\u2212"
PERCENT = f"{NBSP}%"
CI = f"95{PERCENT}{NBSP}CI"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_COUNTED_QUERIES, _MOST_QUERIES = 6, 99_999
"""log10 from which only the power of ten is written, and above which ``>`` is added."""


Valued = Interval | ResultRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A formatted estimate and its formatted interval ("" if there is no estimate)."""

    value: str
    interval: str


RISK_LABELS = {risk: name.capitalize() for risk, name in RISK_NAMES.items()}
"""Headings of the extraction rates."""


def number(value: float | None, decimals: int = 3) -> str:
    """Format a number; very large and very small ones in scientific notation."""
    if value is None:
        return MISSING
    size = abs(value)
    if size >= 1e7 or 0 < size < 0.5 * 10**-decimals:
        return f"{value:.2e}".replace("-", MINUS)
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def count(value: int | None) -> str:
    """Format a count with thousands separators."""
    return MISSING if value is None else f"{value:,}"


def queries(log10_queries: float) -> str:
    """Format an attack cost: ``1``, ``40``, ``2,300``, ``10⁷``.

    Up to a hundred queries, the number is rounded up to an integer; above, to two digits.
    """
    if log10_queries >= _COUNTED_QUERIES:
        more = ">" + NBSP if log10_queries > _MOST_QUERIES else ""
        power = str(round(min(log10_queries, _MOST_QUERIES)))
        return f"{more}10{power.translate(_SUPERSCRIPTS)}"
    queries = 10 ** max(log10_queries, 0.0)
    if queries <= 100:
        # 10 ** log10(3) is slightly above 3 in floating point.
        return str(math.ceil(queries - 1e-9 * queries))
    return f"{round(queries, 1 - math.floor(math.log10(queries))):,.0f}"


def bits(bits: float | None) -> str:
    """Format an exposure."""
    return MISSING if bits is None else f"{number(bits, 1)}{NBSP}bits"


def signed(value: float | None, decimals: int = 3) -> str:
    """Format a difference with its sign."""
    if value is None:
        return MISSING
    return f"+{number(value, decimals)}" if value > 0 else number(value, decimals)


def relative_change(value: float, reference: float) -> float | None:
    """Return ``value / reference - 1``; None if the reference is not positive or far too small."""
    if reference <= 0 or value > 1e6 * reference:
        return None
    return value / reference - 1


def change(share: float | None) -> str:
    """Format a relative change with its sign: ``+4.8 %``; one that rounds to 0 is ``0.0 %``."""
    return MISSING if share is None else f"{_sign_percent(share)}{PERCENT}"


def _sign_percent(share: float) -> str:
    # Adding 0.0 turns the -0.0 that rounding can give into 0.0.
    return signed(round(100 * share, 1) + 0.0, 1)


def change_range(change: Valued | None) -> str:
    """Format the interval of a relative change, ``+1.2 to +3.4 %``; "" without one."""
    if change is None or change.ci is None:
        return ""
    low, high = map(_sign_percent, change.ci)
    return f"{low} to {high}{PERCENT}"


def percent(share: float | None) -> str:
    """Format a share (0..1) in percent: ``1.5 %``, ``0.15 %``, ``99.96 %``."""
    return MISSING if share is None else f"{_percent_number(share)}{PERCENT}"


def _percent_number(share: float) -> str:
    percent = 100 * share
    if 0 < percent < 0.01:
        return "<" + NBSP + "0.01"
    if 99.99 < percent < 100:
        return ">" + NBSP + "99.99"
    if percent in (0, 100):
        return f"{percent:.0f}"
    # One more digit near 0 and 100, where one decimal is not enough.
    decimals = 2 if percent < 0.995 or 99.95 <= percent < 100 else 1
    return f"{percent:,.{decimals}f}".replace("-", MINUS)


def percent_range(ci: tuple[float, float] | None) -> str:
    """Format an interval of shares: ``0.3–4.3 %``."""
    if ci is None:
        return "no interval"
    return f"{_percent_number(ci[0])}–{_percent_number(ci[1])}{PERCENT}"


def percent_ci(ci: tuple[float, float] | None) -> str:
    """Format an interval of shares with its label: ``95 % CI 0.3–4.3 %``."""
    return "no interval" if ci is None else f"{CI}{NBSP}{percent_range(ci)}"


def rate(rate: Rate | ResultRow) -> str:
    """Format a rate with counts and interval: ``3 of 200, 1.5 %, 95 % CI 0.3–4.3 %``."""
    value = rate.value if isinstance(rate, ResultRow) else rate.rate
    if value is None:
        return "no documents"
    return f"{counts(rate)}, {percent(value)}, {percent_ci(rate.ci)}"


def counts(rate: Rate | ResultRow) -> str:
    """Format the counts of a rate: ``3 of 200``; with copies ``26 of 39 (20 of 33 texts)``."""
    documents = of(rate.num_matched or 0, rate.num_documents)
    different = texts(rate)
    return f"{documents} ({different})" if different else documents


def texts(rate: Rate | ResultRow) -> str:
    """Format how many different texts match: ``20 of 33 texts``; "" without copies."""
    if isinstance(rate, ResultRow):
        matched, whole = rate.num_matched_clusters, rate.num_clusters
    else:
        known = rate.texts
        matched, whole = (known.num_matched, known.num_texts) if known else (None, None)
    return "" if whole is None else f"{of(matched or 0, whole)}{NBSP}texts"


def threshold(share: float) -> str:
    """Format a share that is a setting, with no more digits than it has: ``90 %``."""
    return f"{100 * share:.4g}{PERCENT}"


def of(part: int, whole: int) -> str:
    """Format counts: ``3 of 200``, without a line break."""
    return f"{part:,}{NBSP}of{NBSP}{whole:,}"


def p(p_value: float) -> str:
    """Format a p-value with three decimals; smaller ones as ``< 0.001``."""
    return "<" + NBSP + "0.001" if p_value < 0.001 else f"{p_value:.3f}"


def share(interval: Valued | None) -> Estimate:
    """Format a mean share and its interval in percent."""
    if interval is None or interval.value is None:
        return Estimate(value=MISSING, interval="")
    return Estimate(value=percent(interval.value), interval=percent_range(interval.ci))


def points(interval: Valued | None) -> Estimate:
    """Format a difference of rates in percentage points."""
    estimate = _estimate(interval, _sign_percent, " to ")
    if interval is None or interval.value is None:
        return estimate
    return replace(estimate, value=f"{estimate.value}{NBSP}pp")


def interval(interval: Valued | None, decimals: int = 3) -> Estimate:
    """Format an estimate and its interval."""
    estimate = _estimate(interval, lambda value: number(value, decimals), "–")
    # A dash next to a minus sign reads as another minus.
    joint = " to " if MINUS in estimate.interval else "–"
    return replace(estimate, interval=estimate.interval.replace("–", joint))


def difference(interval: Valued | None, decimals: int = 3) -> Estimate:
    """Format a difference with its sign and its interval."""
    return _estimate(interval, lambda value: signed(value, decimals), " to ")


def _estimate(interval: Valued | None, write: Callable[[float], str], joint: str) -> Estimate:
    if interval is None or interval.value is None:
        return Estimate(value=MISSING, interval="")
    ends = "no interval" if interval.ci is None else joint.join(map(write, interval.ci))
    return Estimate(value=write(interval.value), interval=ends)


def duration(seconds: float) -> str:
    """Format a duration: ``0.4 s``, ``52 s``, ``4 min 12 s``, ``1 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f}{NBSP}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{NBSP}s"
    if whole < 3600:
        return f"{whole // 60}{NBSP}min {whole % 60:02d}{NBSP}s"
    return f"{whole // 3600:,}{NBSP}h {whole % 3600 // 60:02d}{NBSP}min"


def time(created: str) -> str:
    """Format a time of a record (UTC, ISO 8601): ``2026-01-02 03:04:05 UTC``."""
    return clean_name(created, 40).replace("T", " ").replace("Z", " UTC")


def hash(digest: str | None) -> str:
    """Format the first 12 characters of a hash."""
    return MISSING if not digest else clean_text(digest[:12]) + ("…" if len(digest) > 12 else "")


def times(number: int) -> str:
    """Format how often something happened: ``once``, ``16 times``."""
    return "once" if number == 1 else f"{number:,} times"


def repetitions(num_repetitions: int | None) -> str:
    """Format how often a document was trained."""
    return "unknown" if num_repetitions is None else f"{num_repetitions:,}"


def settings(settings: Mapping[str, Any]) -> str:
    """Format a mapping with a name (a probe, a mitigation): ``goldfish (k 4, mode hash)``."""
    others = ", ".join(
        f"{clean_text(str(key), 40)} {clean_text(value(item), NAME_LIMIT)}"
        for key, item in settings.items()
        if key != "name" and item != {}
    )
    if "name" not in settings:
        return others or "none"
    name = clean_text(str(settings["name"]), NAME_LIMIT)
    return f"{name} ({others})" if others else name


def value(setting: Any) -> str:
    """Format the value of a setting: lists with commas, null as ``not set``, floats shortest."""
    if setting is None:
        return "not set"
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, list | tuple):
        return "[" + ", ".join(value(item) for item in setting) + "]"
    if isinstance(setting, Mapping):
        # Unset values of nested settings are omitted.
        inside = {key: item for key, item in setting.items() if item is not None}
        return "(" + settings(inside) + ")"
    if isinstance(setting, float) and math.isfinite(setting):
        return f"{setting:g}"
    return str(setting)


def cost(quantile: ResultRow | None) -> str:
    """Format a quantile of the attack cost (``log10_queries``); "" without documents."""
    if quantile is None or not quantile.num_documents:
        return ""
    if quantile.num_documents < MIN_FOR_QUANTILES:
        return f"not shown below {MIN_FOR_QUANTILES} documents"
    return NEVER if quantile.value is None else queries(quantile.value)
