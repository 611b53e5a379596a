"""Judges an audit by a policy, and compares the findings of two audits. No torch.

policy.py     policy files: rules, levels that pass, release
gaps.py       reads an audit: undamaged, or refused; lists what it lacks
measured.py   the rows of results that a rule is about, and what it measures in them
earlier.py    the same against an earlier audit, paired where documents are the same
deciding.py   an interval against a limit; the fewest documents that would decide; sentences
counted.py    rules about the documents that came out, and about epsilon
judge.py      every rule on every row; the result
decision.py   the result in words, and the setting that gives more documents
template.py   a policy to begin with, from an audit's own metrics
rendered.py   the result as junit.xml and summary.md
triage.py     documents that a person accepted; memguard accept
diff.py       new, unchanged, gone and not audited documents of two audits; diffed.py: the result
"""
