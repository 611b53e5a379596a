"""The components of pages, and how rows of results are shown in them. No torch.

    page.py        the components: tables, facts, figures, sections; templates only arrange them
    formatting.py  one format for each kind of number; cleans the text of records
    columns.py     columns -> tables; a row of results -> its cell
    pivot.py       rows of results -> tables: every table of rates is drawn by it
    facts.py       what pages say of an audit; which probes ran, and why others did not
    doses.py       extraction by number of repetitions: figure and tables
    judgements.py  what a gate judged, as texts and at the head of a page
    extraction_cost.py  the section that sampling and attacks share
    membership.py  the section on membership: AUC, true-positive rates, the blind baseline
    roc.py         its figure: true against false positives

Below `audit`, so that a probe can hold the section of the page that shows its results.
"""
