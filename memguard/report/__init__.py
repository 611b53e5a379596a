"""Render records as offline HTML files, SVG images and model cards. No torch.

rendering
    html.py                the page of a report or a comparison as one file; its links
    charts.py, svg.py      charts as inline SVG; a drawing as SVG elements or as a file
    next_steps.py          decisions that follow from the badges of an audit
    texts.py               limitations, identity, method
    glossary.toml          the terms of the pages
an audit; the sections of probes are in `audit.probes`
    audit_facts.py         an audit report -> what pages say of it
    audit_summary.py       tables by bucket, the list of findings
    audit_training.py      cost of training, benchmark tasks
    training_curve.py      losses and extraction by step; the page of a run without an audit
the page of a comparison
    comparison_page.py     a comparison -> the contents of its page
    comparison_front.py    figures: risk against utility; rates by number of repetitions
    comparison_tables.py   tables with a row per setting or per run
    comparison_paired.py   tables of paired tests
    comparison_utility.py  the utility that was chosen; tables of benchmark tasks
    comparison_picture.py  the comparison as one SVG image
    seed_means.py          settings over their seeds, and cells that show them
other forms
    notebook_card.py       results as cards in notebooks
    model_card.py          README.md of an exported or a merged model, and of one on a hub

The components of pages are in `memguard.pages`. The page modules compute every number and sentence;
templates only arrange them. The text of records is untrusted: `formatting` cleans it, the template
engine escapes it, and the page's policy forbids scripts and network access. Rendering is
deterministic: a link is the only part that depends on other files. matplotlib is imported when a
chart is drawn.
"""
