"""Convert a comparison of settings into the texts, tables and figures of its page."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from memguard.records import MIN_FOR_QUANTILES, NUM_RISK_QUERIES, Comparison, ComparisonCell
from memguard.report import formatting as fmt
from memguard.report.audit_attacks import write_cost_in_queries
from memguard.report.comparison_front import build_front, build_trends, describe_recommendation
from memguard.report.comparison_paired import build_paired, build_paired_canaries
from memguard.report.comparison_tables import (
    build_extraction,
    build_gains,
    build_headline,
    build_settings,
)
from memguard.report.facts import describe_environment
from memguard.report.page import ComparisonPage, Fact, Link
from memguard.report.seed_means import (
    Greedy,
    Setting,
    average,
    compute_change,
    describe_other_dose,
    label_setting,
    list_settings,
    list_shares,
    name_dose,
    name_first,
    pick_highest,
    show_loss,
)
from memguard.report.texts import COMPARISON_CONFIDENTIALITY, READING_GUIDE, write_glossary

_MOST_SUMMARISED = 12


def digest_comparison(comparison: Comparison, links: tuple[Link, ...] = ()) -> ComparisonPage:
    """Convert a comparison into the contents of its page.

    Args:
        comparison: the record.
        links: reports of the compared runs.
    """
    heading = f"Comparison '{fmt.clean_name(comparison.name)}'"
    gains = build_gains(comparison)
    return ComparisonPage(
        title=heading,
        heading=heading,
        links=links,
        front=build_front(comparison),
        tool_version=fmt.clean_name(comparison.tool_version, 40),
        confidentiality=COMPARISON_CONFIDENTIALITY,
        identity=_describe_identity(comparison),
        recommendation=describe_recommendation(comparison),
        in_short_lead=_write_in_short_lead(comparison),
        in_short=_write_in_short(comparison),
        guide=(*READING_GUIDE, *_describe_learned(comparison)),
        headline=build_headline(comparison),
        gains=gains,
        paired=tuple(filter(None, (build_paired(comparison), build_paired_canaries(comparison)))),
        figures=build_trends(comparison),
        extraction=build_extraction(comparison),
        settings=build_settings(comparison),
        command=fmt.clean_text(comparison.command, fmt.COMMAND_LIMIT),
        environment=describe_environment(comparison.environment),
        glossary=write_glossary(None, attacked=gains is not None),
    )


def _describe_identity(comparison: Comparison) -> tuple[Fact, ...]:
    settings = comparison.settings
    seeds = sorted({setting.seed for setting in settings})
    first = settings[0].utility
    return (
        Fact(
            "Compared",
            f"{len({setting.name for setting in settings}):,} settings",
            detail=f"{len(settings):,} runs",
        ),
        Fact("Seeds", ", ".join(map(str, seeds[:12]))),
        Fact("Documents", fmt.hash(comparison.documents_sha256), code=True),
        Fact("Continuation", f"{comparison.continuation_tokens:,} tokens"),
        Fact(
            "Held-out NLL on",
            f"{fmt.count(first.num_documents)} documents",
            detail=f"{fmt.count(first.num_tokens)} tokens",
        ),
        Fact(
            "Created",
            fmt.time(comparison.created) if comparison.created else "not recorded",
            detail=f"memguard {fmt.clean_name(comparison.tool_version, 40)}",
        ),
    )


def _write_in_short_lead(comparison: Comparison) -> str:
    dose = pick_highest(comparison)
    if dose is None:
        return "No trained bucket was measured; only the loss on held-out documents is known."
    return (
        f"Documents {name_dose(dose)}, continuation of {comparison.continuation_tokens:,} tokens:"
    )


def _write_in_short(comparison: Comparison) -> tuple[Fact, ...]:
    """Summarise risk and cost of each setting in one sentence, and the control."""
    sentences = [
        Fact(fmt.clean_name(setting.name), _summarise(comparison, setting))
        for setting in list_settings(comparison)[:_MOST_SUMMARISED]
    ]
    return (*sentences, *_summarise_control(comparison))


def _summarise(comparison: Comparison, setting: Setting) -> str:
    loss = f"held-out NLL {show_loss(comparison, setting).text}"
    change = compute_change(comparison, setting)
    if setting.name != comparison.settings[0].name and change is not None:
        loss += f" ({fmt.change(change)} from '{name_first(comparison)}')"
    cells = setting.cells
    num_documents = sum(cell.num_documents for cell in cells)
    if not num_documents:
        return f"no document in this bucket; {loss}."
    verbatim, near = (
        [share.num_matched for share in list_shares(cells, metric)] for metric in get_args(Greedy)
    )
    other = describe_other_dose(setting, comparison)
    text = f"{other}: " if other else ""
    text += f"{fmt.of(sum(verbatim), num_documents)} verbatim"
    if len(near) == len(cells):
        text += f", {fmt.of(sum(near), num_documents)} near-verbatim"
    else:
        text += ", near-verbatim not generated"
    if not any([*verbatim, *near]) and len(cells) == 1:
        text += f" ({fmt.percent_ci(cells[0].ci)})"
    accuracy = average([cell.mean_token_accuracy for cell in cells])
    if accuracy is not None:
        text += f", teacher-forced accuracy {fmt.percent(accuracy)}"
    return f"{_describe_verdict(setting)}{text}{_describe_attacks(cells)}; {loss}."


def _describe_verdict(setting: Setting) -> str:
    """Return the verdict of a setting's only run; of several runs, the table has the levels."""
    if len(setting.runs) != 1:
        return ""
    verdict = setting.runs[0].verdict
    told = f" {verdict.membership.sentence}" if verdict.membership.level == "told-apart" else ""
    return f"{fmt.clean_text(verdict.describe() + told)} "


def _describe_attacks(cells: Sequence[ComparisonCell]) -> str:
    """Report the attack cost and the best attack, over seeds; "" if neither was measured."""
    text = ""
    costs = [cell.attack_cost for cell in cells if cell.attack_cost]
    costs = [cost for cost in costs if cost.num_documents >= MIN_FOR_QUANTILES]
    if costs:
        # The mean is infinite if one of them is.
        medians = [cost.median for cost in costs]
        mean = None if None in medians else average(medians)
        text += f"; median attack cost {write_cost_in_queries(costs[0], mean)}"
    matched: Counter[str] = Counter()
    attacked: Counter[str] = Counter()
    for result in (result for cell in cells for result in cell.attacks):
        matched[result.attack] += result.any_verbatim.num_matched
        attacked[result.attack] += result.any_verbatim.num_documents
    if matched:
        best = max(matched, key=lambda attack: matched[attack])
        text += f"; the best attack extracts {fmt.of(matched[best], attacked[best])}"
    return text


def _summarise_control(comparison: Comparison) -> tuple[Fact, ...]:
    controls = [s.extraction["0"] for s in comparison.settings if "0" in s.extraction]
    if not sum(control.num_documents for control in controls):
        return ()
    most = max(controls, key=lambda cell: cell.greedy.num_matched)
    how = "verbatim" if most.near_verbatim is None else "near-verbatim"
    text = f"{fmt.of(most.greedy.num_matched, most.num_documents)} {how}"
    if most.greedy.num_matched:
        text = f"at most {text}"
    shares = [c.mean_token_accuracy for c in controls if c.mean_token_accuracy is not None]
    if shares:
        low, high = fmt.percent(min(shares)), fmt.percent(max(shares))
        text += f", teacher-forced accuracy {low if low == high else f'{low} to {high}'}"
    return (Fact("Control, never trained", f"{text}, over all settings."),)


def _describe_learned(comparison: Comparison) -> tuple[str, ...]:
    """Report the largest gain in token accuracy of a bucket without extracted documents."""
    gains = []
    for setting in comparison.settings:
        for dose, cell in setting.extraction.items():
            gain = cell.gain_minus_control
            if dose != "0" and gain is not None and not _is_extracted(cell):
                gains.append((gain, setting, dose))
    certain = [row for row in gains if row[0].ci is not None and row[0].ci[0] > 0]
    if not certain:
        return ()
    gain, setting, dose = max(certain, key=lambda row: row[0].value)
    points = fmt.points(gain)
    return (
        f"With '{label_setting(setting, comparison)}' no document {name_dose(dose)} is extracted, "
        f"yet training raised their teacher-forced token accuracy by {points.value} more than that "
        f"of the control ({points.in_words}): 0{fmt.PERCENT} extracted does not mean that nothing "
        "was learned from them.",
    )


def _is_extracted(cell: ComparisonCell) -> bool:
    within = None if cell.attack_cost is None else cell.attack_cost.within.get(NUM_RISK_QUERIES)
    rates = [attack.any_verbatim for attack in cell.attacks]
    rates += [] if within is None else [within]
    return bool(cell.greedy.num_matched or any(rate.num_matched for rate in rates))
