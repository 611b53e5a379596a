"""Render records as offline HTML files, SVG images and model cards. No torch.

    audit report ─► audit_page ──────────────────┐
                      audit_summary, audit_doses  ├─► page (components) ─► html ─► one file
                      audit_attacks, audit_probes │                         │
                      audit_membership            │                         └─ templates/*.j2
                      audit_canaries              │                            charts ─► svg
                      audit_variants, facts, texts│                            links
    comparison ─┬► comparison_page ──────────────┘
                │     comparison_front, seed_means
                │     comparison_tables, comparison_paired
                └► comparison_picture ─► charts ─► svg ─► one SVG file
    audit report ─► model_card ─► README.md        merged model ─► merged_card ─► README.md

    Column(heading, model, base) ─► tables ─► page.Table: every table of both pages

The page modules compute every number and sentence; templates only arrange them. `formatting` has
one format for each kind of number, and cleans the text of records, which is untrusted; the template
engine escapes it, and the page's policy forbids scripts and network access. Rendering is
deterministic: a link is the only part that depends on other files. matplotlib is imported when a
chart is drawn.
"""

from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.html import render_comparison, render_report
from memguard.report.model_card import render_model_card

__all__ = ["render_comparison", "render_comparison_chart", "render_model_card", "render_report"]
