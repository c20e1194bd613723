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
    from turbopump.spark.pipelines.archived import read_archive
    from turbopump.spark.pipelines.archiving import ArchiveReport, archive
    from turbopump.spark.pipelines.compaction import CompactionReport, compact
    from turbopump.spark.pipelines.lags import LagReport, lag
    from turbopump.spark.pipelines.pacing import Pace
    from turbopump.spark.pipelines.plots import save_lag_plot, save_trace_plot
    from turbopump.spark.pipelines.redriving import RedriveReport, redrive
    from turbopump.spark.pipelines.replaying import ReplayReport, replay
    from turbopump.spark.pipelines.traces import TraceReport, trace
else:
    # The modules are not named as the functions: importing one would put it in a function's place.
    _HOMES = {
        "ArchiveReport": "archiving",
        "CompactionReport": "compaction",
        "LagReport": "lags",
        "Pace": "pacing",
        "RedriveReport": "redriving",
        "ReplayReport": "replaying",
        "TraceReport": "traces",
        "archive": "archiving",
        "compact": "compaction",
        "lag": "lags",
        "read_archive": "archived",
        "redrive": "redriving",
        "replay": "replaying",
        "save_lag_plot": "plots",
        "save_trace_plot": "plots",
        "trace": "traces",
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
