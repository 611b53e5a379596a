"""What people read: records rendered as one offline HTML file or a model card. No torch.

    audit report ─► digest ─────────────┐
                      audit_tables       ├─► page (frozen pieces) ─► html ─► one file
                      dose_response      │                            │
                      prose              │                            └─ templates/*.j2
    comparison ──► comparison_digest ───┘                                charts ─► svg
                      comparison_figures, doses
    audit report ─► model_card ─► README.md

A digest decides every number and sentence; templates only place them and hold no arithmetic.
`formatting` spells each kind of number in one way. All text of a record counts as hostile: `text`
takes out what escaping leaves in, the template engine escapes, the page's policy forbids scripts
and network. The same record gives the same bytes. matplotlib is imported when a chart is drawn.
"""

from memguard.report.html import render_comparison, render_report
from memguard.report.model_card import render_model_card

__all__ = ["render_comparison", "render_model_card", "render_report"]
