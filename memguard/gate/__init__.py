"""Judges an audit by a policy, and compares the findings of two audits. No torch.

judging
    policy.py        policy files: rules, levels that pass, triage, release
    audited.py       reads an audit: undamaged, or refused; lists what it lacks
    selecting.py     the rows of results that a rule is about, or why there are none
    measured.py      what a rule measures in a row: a value with its interval
    earlier.py       the same against an earlier audit, paired where documents are the same
    counted.py       the number of findings, and epsilon
    deciding.py      an interval against a limit; the fewest documents that would decide
    judge.py         every rule on every row; the result
    words.py         numbers and sentences
    template.py      a policy to begin with, from an audit's own metrics
what is written
    junit.py         junit.xml
    summary.py       summary.md
    markdown.py      tables and escaping in Markdown
findings
    triage.py        findings that a person accepted
    diff.py          new, unchanged, gone and not audited findings of two audits
"""
