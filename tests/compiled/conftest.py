"""A process of its own: Triton either interprets kernels or compiles them. Run by `scripts/test --compiled`."""

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "0" else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of what every kernel takes on every target."""
    rows = sorted(set(_rows(terminalreporter)))
    if rows:
        terminalreporter.section("kernels compiled ahead of time")
        columns = ("target", "kernel", "configuration", "regs", "spilled", "shared", "16-byte loads", "matrix")
        for row in [columns, *rows]:
            terminalreporter.line(
                f"{row[0]:<7} {row[1]:<24} {row[2]:<34} {row[3]:>4} {row[4]:>7} {row[5]:>7} {row[6]:>13} {row[7]}"
            )


def _rows(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, ...]]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            yield from (value for name, value in getattr(report, "user_properties", []) if name == "kernel")
