"""Ready-made pipelines: each a function that returns a report, and a command that prints it.

::

    from turbopump.spark import pipelines, session

    source = {"nameserver": "127.0.0.1:9876", "topic": "orders"}
    report = pipelines.archive(session(), "archive/orders", source)
    print(report.rows, report.batches)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbopump.spark.pipelines.archive_reader import read_archive
    from turbopump.spark.pipelines.archive_replay import ReplayReport, replay
    from turbopump.spark.pipelines.archive_writer import ArchiveReport, archive
    from turbopump.spark.pipelines.compaction import CompactionReport, compact
    from turbopump.spark.pipelines.dead_letter_redrive import RedriveReport, redrive
    from turbopump.spark.pipelines.group_lag import LagReport, lag
    from turbopump.spark.pipelines.pacing import Pace
    from turbopump.spark.pipelines.plots import save_lag_plot, save_trace_plot
    from turbopump.spark.pipelines.trace_analysis import TraceReport, trace
else:
    # Modules have other names than the functions: importing one would replace the function.
    _HOMES = {
        "ArchiveReport": "archive_writer",
        "CompactionReport": "compaction",
        "LagReport": "group_lag",
        "Pace": "pacing",
        "RedriveReport": "dead_letter_redrive",
        "ReplayReport": "archive_replay",
        "TraceReport": "trace_analysis",
        "archive": "archive_writer",
        "compact": "compaction",
        "lag": "group_lag",
        "read_archive": "archive_reader",
        "redrive": "dead_letter_redrive",
        "replay": "archive_replay",
        "save_lag_plot": "plots",
        "save_trace_plot": "plots",
        "trace": "trace_analysis",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{home}"), name)


__all__ = [
    "ArchiveReport",
    "CompactionReport",
    "LagReport",
    "Pace",
    "RedriveReport",
    "ReplayReport",
    "TraceReport",
    "archive",
    "compact",
    "lag",
    "read_archive",
    "redrive",
    "replay",
    "save_lag_plot",
    "save_trace_plot",
    "trace",
]
