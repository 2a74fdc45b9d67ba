"""What became of the cases of each fuzzer, at the end."""

from __future__ import annotations

from fuzz import cases


def pytest_terminal_summary(terminalreporter):
    """Print the counts."""
    for fuzzer, outcomes in sorted(cases.COUNTS.items()):
        counted = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
        terminalreporter.write_line(f"{fuzzer}: {outcomes.total():,} cases: {counted}")
