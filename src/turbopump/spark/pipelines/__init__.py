"""Ready-made pipelines: each a function that returns a report, and a command that prints it.

::

    from turbopump.spark import pipelines, session

    source = {"nameserver": "127.0.0.1:9876", "topic": "orders"}
    report = pipelines.archive(session(), "archive/orders", source)
    print(report.rows, report.batches)
"""

from typing import TYPE_CHECKING

from turbopump.lazy_names import lazy_names

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
        "spark.pipelines.archive_reader": "read_archive",
        "spark.pipelines.archive_replay": "ReplayReport replay",
        "spark.pipelines.archive_writer": "ArchiveReport archive",
        "spark.pipelines.compaction": "CompactionReport compact",
        "spark.pipelines.dead_letter_redrive": "RedriveReport redrive",
        "spark.pipelines.group_lag": "LagReport lag",
        "spark.pipelines.pacing": "Pace",
        "spark.pipelines.plots": "save_lag_plot save_trace_plot",
        "spark.pipelines.trace_analysis": "TraceReport trace",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)


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
