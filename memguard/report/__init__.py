"""What people read: records rendered as one offline HTML file or a model card. No torch.

    audit report ─► audit_page ──────────────────┐
                      audit_summary, audit_doses  ├─► page (frozen pieces) ─► html ─► one file
                      audit_attacks, audit_probes │                            │
                      audit_membership            │                            └─ templates/*.j2
                      audit_canaries              │                               charts ─► svg
                      facts, texts                │
    comparison ─┬► comparison_page ──────────────┘
                │     comparison_front, seed_means
                │     comparison_tables, comparison_paired
                └► comparison_picture ─► charts ─► svg ─► one SVG file
    audit report ─► model_card ─► README.md

    Column(heading, model, base) ─► tables ─► page.Table: every table of both pages

The pages decide every number and sentence; templates only place them and hold no arithmetic.
`formatting` writes each kind of number in one way and removes from a record's text, which counts as
hostile, what escaping leaves in; the template engine escapes, the page's policy forbids scripts
and network. The same record gives the same bytes. matplotlib is imported when a chart is drawn.
"""

from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.html import render_comparison, render_report
from memguard.report.model_card import render_model_card

__all__ = ["render_comparison", "render_comparison_chart", "render_model_card", "render_report"]
