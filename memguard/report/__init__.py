"""What people read: records rendered as one offline HTML file or a model card. No torch.

    audit report ─► digest ──────────────────────┐
                      audit_tables, cells         ├─► page (frozen pieces) ─► html ─► one file
                      attack_cost, attacks        │                            │
                      counterfactual              │                            └─ templates/*.j2
                      dose_response, trends       │                               charts ─► svg
                      grid, generation, measured  │                               front_chart ─┘
                      membership, masks           │
                      canaries, exposure, watched │
                      findings, facts, probes     │
                      prose, glossary             │
    comparison ─┬► comparison_digest ────────────┘
                │     comparison_front, comparison_figures
                │     comparison_tables, paired
                │     comparison_gains, seed_means, doses
                └► comparison_picture ─► front_chart ─► svg ─► one SVG file
    audit report ─► model_card ─► README.md

A digest decides every number and sentence; templates only place them and hold no arithmetic.
`formatting` spells each kind of number in one way. All text of a record counts as hostile: `text`
takes out what escaping leaves in, the template engine escapes, the page's policy forbids scripts
and network. The same record gives the same bytes. matplotlib is imported when a chart is drawn.
"""

from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.html import render_comparison, render_report
from memguard.report.model_card import render_model_card

__all__ = [
    "render_comparison",
    "render_comparison_chart",
    "render_model_card",
    "render_report",
]
